"""The trained model: a batch laid out, forwarded, its loss, the guarded optimizer, and what an update did and took."""
