"""Measure what grows faster than the work: ``python -m benchmarks.growth``."""
