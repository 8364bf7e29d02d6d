"""What several benchmarks share; nothing in here is a command."""
