"""Compute micro-batches by several processes together: ``python -m benchmarks.parallel``."""
