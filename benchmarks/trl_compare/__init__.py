"""leadline against TRL on the same work: `python -m benchmarks.trl_compare --help`."""
