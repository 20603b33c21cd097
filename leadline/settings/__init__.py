"""The sections of a recipe, one file each. `config.py` makes one run of them."""
