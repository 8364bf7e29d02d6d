"""The cost to an agent of asking over HTTP: ``python -m benchmarks.agent_server``."""
