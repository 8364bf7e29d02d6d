"""Test whether digests find stale and torn pushes: ``python -m benchmarks.ledger``."""
