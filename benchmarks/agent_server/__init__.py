"""Measure an agent's cost of asking over HTTP: ``python -m benchmarks.agent_server``."""
