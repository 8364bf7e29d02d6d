"""AutoMicroBatches: measures once how many tokens of a micro-batch fit into a GPU's memory."""

import logging
from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch.optim import Optimizer

from lightning_rl.data.batch import empty_like, select, with_host
from lightning_rl.data.splitting import SHARED, Filling, split_micro_batches
from lightning_rl.learn.optimizer_state import state_bytes
from lightning_rl.models.memory import forward_tokens, is_out_of_memory
from lightning_rl.models.parallel.tensor import local
from lightning_rl.run.processes.dist import all_max, rank

_log = logging.getLogger(__name__)

DEFAULT = 16_384
"""Tokens per micro-batch where nothing is measured."""
SAMPLE = 2_048
"""Approximate number of tokens of the smaller measured pass; the larger has twice as many rollouts.
"""
SHARE = 0.85
"""Share of the free memory that a pass may take; fragmentation makes some of it unusable."""
STEP, MOST = 1_024, 65_536
"""Budgets are multiples of ``STEP`` up to ``MOST``; larger micro-batches are hardly faster."""


class AutoMicroBatches:
    """The value of ``max_tokens_per_micro_batch: auto``, part of a run's state once it is measured.

    A pass needs a fixed amount of memory, e.g. for gradients and a chunk of logits, plus an amount
    per token. Two passes over rollouts of the batch determine both. The free memory, minus the
    state that the optimizer is going to allocate, is available for tokens. On several ranks the
    smallest budget is used.

    Args:
        make: creates the optimizer from parameters.
        note: called with the budget once it is measured or restored.
    """

    def __init__(
        self,
        make: Callable[[Any], Optimizer],
        note: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._make = make
        self._note = note
        self.tokens: int | None = None
        """The budget in tokens; None until it is measured."""

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        if self.tokens is not None:
            self._note(self.tokens)

    def measure(
        self,
        batch: TensorDict,
        compute: Callable[[TensorDict], None],
        optimizer: Optimizer,
        device: torch.device,
        filling: Filling = SHARED,
    ) -> int:
        """Measure the budget, on all ranks together.

        Args:
            batch: packed rollouts; a rank may have none.
            compute: runs forward and backward on a micro-batch, and leaves no gradient.
            optimizer: the run's optimizer.
            device: the device that computes.
            filling: how the policy's tokens are counted.

        Returns:
            The budget in tokens, the same on all ranks.
        """
        tokens = DEFAULT
        if (free := free_bytes(device)) is not None:
            owed = owed_bytes(optimizer, self._make)
            fits = _fitting(batch, compute, free, owed, device, filling)
            tokens = -int(all_max(torch.tensor(-fits)))
            if rank() == 0:
                _log.info(
                    "model.update.max_tokens_per_micro_batch: auto is %d from now on: %.1f GiB of "
                    "GPU memory are free, of which the optimizer takes %.1f GiB",
                    tokens,
                    free / 2**30,
                    owed / 2**30,
                )
        self.tokens = tokens
        self._note(tokens)
        return tokens


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory that no process uses; None if the device is not a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # torch's own leftovers are free, too
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(
    compute: Callable[[TensorDict], None], micro_batch: TensorDict, device: torch.device
) -> int:
    """Return the peak memory in bytes of passes over a micro-batch, beyond what was allocated."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute(micro_batch)
    return torch.cuda.max_memory_allocated(device) - before


def owed_bytes(optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> int:
    """Return the bytes of optimizer state that the first step will allocate; 0 after that step."""
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
    """Return this rank's budget in tokens."""
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
    """Return two micro-batches of the longest rollouts, repeated; the second has twice as many."""
    if not len(batch["rollouts"]):
        return empty_like(batch), empty_like(batch)
    rows = split_micro_batches(batch, SAMPLE, False, filling)[0]
    times = ceil(SAMPLE / forward_tokens(select(batch, rows), filling))
    return select(batch, rows.repeat(times)), select(batch, rows.repeat(2 * times))
