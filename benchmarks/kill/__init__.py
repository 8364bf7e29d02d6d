"""Runs that are killed, and go on as if they were not: ``python -m benchmarks.kill``."""
