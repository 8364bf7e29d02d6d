"""Environments for verifiers: hosted under a Python of their own, played by our models."""
