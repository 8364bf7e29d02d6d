"""Policies: a causal LM with its heads, exact on packed rollouts, within the memory available."""
