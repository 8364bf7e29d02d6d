"""Measure the memory that a policy keeps between its passes."""

from tensordict import TensorDict

from lightning_rl.cli.check.tracking import follow
from lightning_rl.models.policy import Policy


def kept_for_backward(policy: Policy, micro_batch: TensorDict) -> float:
    """Return the bytes between a micro-batch's forward and backward pass, but for weights."""
    return follow(policy, micro_batch).kept
