"""What is looked at before the first step of a run: each check says what it saw, and one that fails stops the run."""
