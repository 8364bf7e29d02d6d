"""Attention over packed rollouts: one fused kernel call, or the batches that replace it."""
