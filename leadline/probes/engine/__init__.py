"""Engine against trainer on the same tokens: how far they are apart, and why."""
