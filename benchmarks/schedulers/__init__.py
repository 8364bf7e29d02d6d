"""Compare collectors, simulated and real: ``python -m benchmarks.schedulers``."""
