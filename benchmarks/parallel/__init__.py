"""Compute packs by several processes together: ``python -m benchmarks.parallel``."""
