"""Environments of the verifiers library, each name from its module."""

from lightning_rl.verifiers.agent import (
    VerifiersAgent as VerifiersAgent,
)
from lightning_rl.verifiers.prompts import (
    VerifiersPrompts as VerifiersPrompts,
)
