"""AutoPacks: how many tokens a pack may have so that it fits into a GPU's memory, measured once."""

import logging
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch.optim import Optimizer

from lightning_rl.data.batch import empty_like, select, with_host
from lightning_rl.data.splitting import SHARED, Filling, split_packs
from lightning_rl.learn.optimizer_state import state_bytes
from lightning_rl.models.memory import forward_tokens, is_out_of_memory
from lightning_rl.models.tensor import local
from lightning_rl.run.dist import all_max, rank

_log = logging.getLogger(__name__)

DEFAULT = 16_384
"""Tokens of a pack where nothing is measured."""
SAMPLE = 2_048
"""About the tokens of the smaller pass that is measured; the larger has twice as many rollouts."""
SHARE = 0.85
"""A pass may take this share of the free memory: some of its pieces are too small to use."""
STEP, MOST = 1_024, 65_536
"""Budgets are whole multiples of the one, up to the other: larger packs are hardly faster."""


class AutoPacks:
    """What ``max_tokens_per_pack: auto`` stands for: part of a run's state once it is measured.

    A pass takes what it always takes, such as gradients and a chunk of logits, and so much for each
    token. Two passes of rollouts that are to be trained on tell both. What is free then, less the
    state that the optimizer is going to have, is for the tokens. Of several ranks the one with the
    least decides.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        """The budget; None: it is not measured yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]

    def measure(
        self,
        batch: TensorDict,
        compute: Callable[[TensorDict], None],
        optimizer: Optimizer,
        make: Callable[[Any], Optimizer],
        device: torch.device,
        filling: Filling = SHARED,
    ) -> int:
        """Find the budget, on all ranks together.

        Args:
            batch: packed rollouts; a rank may have none.
            compute: a forward and a backward pass of a pack, which leaves no gradient.
            optimizer: that of the run.
            make: made it, of parameters.
            device: that computes.
            filling: how the policy's tokens are counted.
        """
        tokens = DEFAULT
        if (free := free_bytes(device)) is not None:
            owed = owed_bytes(optimizer, make)
            fits = _fitting(batch, compute, free, owed, device, filling)
            tokens = -int(all_max(torch.tensor(-fits)))
            if rank() == 0:
                _log.info(
                    "model.max_tokens_per_pack: auto is %d from here on: %.1f GiB of the GPU were "
                    "free, and the optimizer takes %.1f GiB of them",
                    tokens,
                    free / 2**30,
                    owed / 2**30,
                )
        self.tokens = tokens
        return tokens


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that nobody has, whichever process; None of what is no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # torch's own leftovers are free, too
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(
    compute: Callable[[TensorDict], None], pack: TensorDict, device: torch.device
) -> int:
    """The most that passes of a pack have on a GPU at a time, beside what was there before."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute(pack)
    return torch.cuda.max_memory_allocated(device) - before


def owed_bytes(optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> int:
    """Bytes of the state that an optimizer will have from its first step on, and has not yet."""
    if optimizer.state:
        return 0
    parts = [local(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    on_gpu = [part for part in parts if part.device.type != "cpu"]
    dtypes = {part.dtype for part in on_gpu}
    return sum(
        state_bytes(make, (part.shape for part in on_gpu if part.dtype == dtype), dtype)[1]
        for dtype in dtypes
    )


def _fitting(
    batch: TensorDict,
    compute: Callable[[TensorDict], None],
    free: int,
    owed: int,
    device: torch.device,
    filling: Filling,
) -> int:
    """The budget of this rank."""
    small, large = _samples(with_host(batch), filling)
    try:
        compute(small)  # libraries' buffers, which a first pass makes for good, are none of its own
        low, high = peak_bytes(compute, small, device), peak_bytes(compute, large, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return STEP
    tokens = forward_tokens(small, filling)
    more = forward_tokens(large, filling) - tokens
    if more <= 0 or high <= low:  # nothing to train on here: other ranks decide
        return MOST
    for_each = (high - low) / more
    fixed = max(0.0, low - for_each * tokens)
    found = int((SHARE * free - owed - fixed) / for_each)
    return min(MOST, max(STEP, found // STEP * STEP))


def _samples(batch: TensorDict, filling: Filling) -> tuple[TensorDict, TensorDict]:
    """Two packs of a batch's longest rollouts, over and over, one of twice as many as the other."""
    if not len(batch["rollouts"]):
        return empty_like(batch), empty_like(batch)
    rows = split_packs(batch, SAMPLE, False, filling)[0]
    times = ceil(SAMPLE / forward_tokens(select(batch, rows), filling))
    return select(batch, rows.repeat(times)), select(batch, rows.repeat(2 * times))
