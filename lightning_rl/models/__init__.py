"""Policies: a causal LM with its heads, exact on packed rollouts, in as much memory as there is."""
