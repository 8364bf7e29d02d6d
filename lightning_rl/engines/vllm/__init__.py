"""vLLM in the training process, and what its workers run wherever they are."""
