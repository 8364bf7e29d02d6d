"""What an agent loses by asking over HTTP: ``python -m benchmarks.agent_server``."""
