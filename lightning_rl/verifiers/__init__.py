"""Environments for verifiers: hosted under a Python of their own, played by our models."""

from lightning_rl.verifiers.agent import VerifiersAgent
from lightning_rl.verifiers.prompts import VerifiersPrompts
