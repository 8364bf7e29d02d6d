"""Packs that several processes compute together: ``python -m benchmarks.parallel``."""
