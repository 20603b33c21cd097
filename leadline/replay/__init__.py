"""`leadline replay`: one step of a run again, as it was and as it would have been. Not `rollout.replay_...`, which reuses
groups in training."""
