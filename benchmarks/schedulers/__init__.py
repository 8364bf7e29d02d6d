"""Collectors compared, simulated and real: ``python -m benchmarks.schedulers``."""
