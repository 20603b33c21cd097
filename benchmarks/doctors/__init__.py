"""`leadline doctor` and two rivals on the same logs."""
