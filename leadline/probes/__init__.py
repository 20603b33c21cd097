"""Probes find the fault before a run: between engine and trainer, and in the user's own code."""
