"""Supervised fine-tuning (`leadline sft`): the warm start before reinforcement learning, by the same policy update."""
