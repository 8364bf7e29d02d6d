"""What a policy keeps between its passes, and what a call has at a time."""

import gc
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import peak_of
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


def peak_while(call: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at one time, what it returns included."""
    gc.collect()  # what earlier tests left would be let go of meanwhile, and be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    return peak_of(profiler)
