"""Reinforcement-learning post-training for language models that cannot fail silently."""

__version__ = "0.1.0"
