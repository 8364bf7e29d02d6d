"""Kill runs that go on as if they were not killed: ``python -m benchmarks.kill``."""
