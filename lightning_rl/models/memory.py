"""Smaller packs for one that does not fit into memory."""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import empty_like, select, with_host
from lightning_rl.data.splitting import SHARED, Filling, split_packs
from lightning_rl.errors import PackMemoryError
from lightning_rl.models.sequence import PackRanks, turns
from lightning_rl.run.dist import world_size

_log = logging.getLogger(__name__)

T = TypeVar("T")


def each_pack(
    call: Callable[[TensorDict], T],
    batch: TensorDict,
    rows: Tensor,
    max_tokens: int,
    together: bool = False,
    ranks: PackRanks | None = None,
    filling: Filling = SHARED,
) -> Iterator[tuple[Tensor, T]]:
    """``call`` on packs of the rollouts ``rows`` (r,) of a batch: the rows of each, and what came.

    A pack that does not fit into memory, and all after it, are cut into smaller ones. ``together``:
    all ranks call as often as any has to, since they gather sharded weights. With ``ranks``, which
    compute each other's packs, a pack may have ``max_tokens`` for each that has some of its tokens.

    Raises:
        PackMemoryError: if that does not help, or other ranks cannot take part.
    """
    batch, rows = with_host(batch), rows.cpu()
    budget = max_tokens * (1 if ranks is None else ranks.shares)
    packs = [rows[p] for p in split_packs(select(batch, rows), budget, filling=filling)]
    left = rows
    for members in turns(packs, ranks, together):
        if members is None:
            call(empty_like(batch))
            continue
        pack = select(batch, members)
        try:
            result = call(pack)
        except RuntimeError as error:
            max_tokens = smaller_budget(pack, error, ranks, filling)
            break  # leave the block first: the error keeps the computed tensors alive
        left = left[~torch.isin(left, members)]
        yield members, result
    else:
        return
    yield from each_pack(call, batch, left, max_tokens, together, ranks, filling)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Recognise torch's out-of-memory errors: a class on GPUs, only a message on CPUs."""
    texts = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in texts)


def smaller_budget(
    pack: TensorDict,
    error: RuntimeError,
    ranks: PackRanks | None = None,
    filling: Filling = SHARED,
) -> int:
    """Half the forward tokens of a pack that failed: for ``split_packs``, to try again.

    Raises:
        RuntimeError: the same one, if it is about something else.
        PackMemoryError: if the pack cannot be cut, for it is one rollout. With several ranks too:
            the others are in the middle of their own packs.
    """
    if not is_out_of_memory(error):
        raise error
    tokens, size = forward_tokens(pack, filling), 1 if ranks is None else ranks.shares
    count, what = len(pack["rollouts"]), str(error).splitlines()[0]
    if count == 1:
        raise PackMemoryError(
            f"a rollout of {tokens} tokens does not fit into memory by itself; lower "
            f"data.sampling.max_tokens, or set model.gradient_checkpointing=true ({what})"
        ) from error
    if world_size() > 1:
        raise PackMemoryError(
            f"{count} rollouts of {tokens} tokens together do not fit into memory; set "
            f"model.max_tokens_per_pack to {tokens // 2 // size} or less ({what})"
        ) from error
    _log.warning(
        "out of memory with %d tokens in a pack; it is done again in packs of at most %d. "
        "Lower model.max_tokens_per_pack to that to save the time",
        tokens,
        tokens // 2,
    )
    return tokens // 2


def forward_tokens(pack: TensorDict, filling: Filling = SHARED) -> int:
    """Tokens that the model computes for a pack: a prompt that rollouts share counts once."""
    return filling.tokens(pack["rollouts"])
