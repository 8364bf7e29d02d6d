"""Run this library beside TRL, in CPU seconds: ``python -m benchmarks.peers``."""
