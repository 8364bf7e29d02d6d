"""Run PPO in cheap environments, here and with others: ``python -m benchmarks.envs``."""
