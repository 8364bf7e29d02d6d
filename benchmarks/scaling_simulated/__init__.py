"""Iterations on up to 1,024 GPUs: ``python -m benchmarks.scaling_simulated``."""
