"""The memory that a policy keeps between its passes."""

from tensordict import TensorDict

from lightning_rl.cli.check.activations import following
from lightning_rl.cli.check.allocations import Held
from lightning_rl.models.policy import Policy


def kept_for_backward(policy: Policy, pack: TensorDict) -> Held:
    """What is there between a pack's forward and backward pass, but for weights."""
    with following(policy, pack) as allocations:
        scores = policy(pack)
        kept = allocations.now
    del scores
    return kept
