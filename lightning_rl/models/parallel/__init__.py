"""One model on several ranks: sharded weights, and tensor, sequence and expert parallelism."""
