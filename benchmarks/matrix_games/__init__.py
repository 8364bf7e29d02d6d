"""Show where learners in four known games end: ``python -m benchmarks.matrix_games``."""
