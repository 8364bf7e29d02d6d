"""Run this library beside TRL, in seconds on two cores: ``python -m benchmarks.wall``."""
