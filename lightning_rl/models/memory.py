"""Splits micro-batches that do not fit into memory."""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import empty_like, select, with_host
from lightning_rl.data.splitting import SHARED, Filling, split_micro_batches
from lightning_rl.errors import MicroBatchMemoryError
from lightning_rl.models.parallel.sequence import MicroBatchRanks, turns
from lightning_rl.run.processes.dist import world_size

_log = logging.getLogger(__name__)

T = TypeVar("T")


def each_micro_batch(
    call: Callable[[TensorDict], T],
    batch: TensorDict,
    rows: Tensor,
    max_tokens: int,
    together: bool = False,
    ranks: MicroBatchRanks | None = None,
    filling: Filling = SHARED,
) -> Iterator[tuple[Tensor, T]]:
    """Call ``call`` on micro-batches of the rollouts ``rows`` (r,); yield their rows and results.

    If a micro-batch does not fit into memory, it and all later ones are split into smaller
    micro-batches. ``together``: all ranks make as many calls as the one with the most, since they
    gather sharded weights. With ``ranks`` that compute each other's micro-batches, a micro-batch
    may have ``max_tokens`` for each rank that shares its tokens.

    Raises:
        MicroBatchMemoryError: if a micro-batch cannot be split, or other ranks cannot take part.
    """
    batch, rows = with_host(batch), rows.cpu()
    budget = max_tokens * (1 if ranks is None else ranks.shares)
    micro_batches = [
        rows[p] for p in split_micro_batches(select(batch, rows), budget, filling=filling)
    ]
    left = rows
    for members in turns(micro_batches, ranks, together):
        if members is None:
            call(empty_like(batch))
            continue
        micro_batch = select(batch, members)
        try:
            result = call(micro_batch)
        except RuntimeError as error:
            max_tokens = smaller_budget(micro_batch, error, ranks, filling)
            break  # leave the block first: the error keeps the computed tensors alive
        left = left[~torch.isin(left, members)]
        yield members, result
    else:
        return
    yield from each_micro_batch(call, batch, left, max_tokens, together, ranks, filling)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error is torch's out of memory: a class on GPUs, only a message on CPUs."""
    texts = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in texts)


def smaller_budget(
    micro_batch: TensorDict,
    error: RuntimeError,
    ranks: MicroBatchRanks | None = None,
    filling: Filling = SHARED,
) -> int:
    """Return half the forward tokens of a failed micro-batch, as the budget of the next attempt.

    Raises:
        RuntimeError: ``error`` itself, unless it is an out-of-memory error.
        MicroBatchMemoryError: if the micro-batch is a single rollout, or there are several ranks,
            since the others are computing their own micro-batches.
    """
    if not is_out_of_memory(error):
        raise error
    tokens, size = forward_tokens(micro_batch, filling), 1 if ranks is None else ranks.shares
    count, what = len(micro_batch["rollouts"]), str(error).splitlines()[0]
    if count == 1:
        raise MicroBatchMemoryError(
            f"a rollout of {tokens} tokens does not fit into memory by itself; lower "
            f"data.sampling.max_tokens, or set model.loading.gradient_checkpointing=true ({what})"
        ) from error
    if world_size() > 1:
        raise MicroBatchMemoryError(
            f"{count} rollouts of {tokens} tokens together do not fit into memory; set "
            f"model.update.max_tokens_per_micro_batch to {tokens // 2 // size} or less ({what})"
        ) from error
    _log.warning(
        "out of memory with %d tokens in a micro-batch; retrying with micro-batches of at most %d. "
        "Lower model.update.max_tokens_per_micro_batch to that to save the time",
        tokens,
        tokens // 2,
    )
    return tokens // 2


def forward_tokens(micro_batch: TensorDict, filling: Filling = SHARED) -> int:
    """Return the tokens that the model computes for a micro-batch; a shared prompt counts once."""
    return filling.tokens(micro_batch["rollouts"])
