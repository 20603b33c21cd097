"""The doctor: reads what a run logged, names what is wrong, and says how it knows and what to change.

Light on purpose: no torch, nothing of the trainer. Begin at `examine.py`.
"""
