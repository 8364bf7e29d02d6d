"""Engines of several processes, any of which may die: vLLM's servers, and Ray actors."""
