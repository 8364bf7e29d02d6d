"""Measure how fast weights get to another process: ``python -m benchmarks.sync``."""
