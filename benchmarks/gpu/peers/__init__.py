"""Run ours beside TRL's GRPOTrainer on a GPU: ``python -m benchmarks.gpu.peers``."""
