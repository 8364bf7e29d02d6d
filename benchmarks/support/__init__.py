"""Share code between several benchmarks; nothing in here is a command."""
