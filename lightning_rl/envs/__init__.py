"""Reinforcement learning of small networks in environments, step by step."""
