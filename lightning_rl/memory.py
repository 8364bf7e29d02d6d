"""What to do about a pack that does not fit into memory."""

import logging

import torch
from tensordict import TensorDict

from lightning_rl.dist import world_size
from lightning_rl.errors import PackMemoryError

_log = logging.getLogger(__name__)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it is torch's way to say so: a class of its own on GPUs, only a message on CPUs."""
    texts = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in texts)


def smaller_budget(pack: TensorDict, error: RuntimeError) -> int:
    """Half the forward tokens of a pack that failed: for ``split_packs``, to try once more.

    Raises:
        RuntimeError: the same one, if it is about something else.
        PackMemoryError: if the pack cannot be cut, for it is one rollout. With several ranks too:
            the others are in the middle of their own packs.
    """
    if not is_out_of_memory(error):
        raise error
    tokens = forward_tokens(pack)
    count, what = len(pack["rollouts"]), str(error).splitlines()[0]
    if count == 1:
        raise PackMemoryError(
            f"a rollout of {tokens} tokens does not fit into memory by itself; lower "
            f"data.sampling.max_tokens, or set model.gradient_checkpointing=true ({what})"
        ) from error
    if world_size() > 1:
        raise PackMemoryError(
            f"{count} rollouts of {tokens} tokens together do not fit into memory; set "
            f"model.max_tokens_per_pack to {tokens // 2} or less ({what})"
        ) from error
    _log.warning(
        "out of memory with %d tokens in a pack; this minibatch is done again with at most %d. "
        "Lower model.max_tokens_per_pack to that to save the time",
        tokens,
        tokens // 2,
    )
    return tokens // 2


def forward_tokens(pack: TensorDict) -> int:
    """Tokens that the model computes for a pack: a prompt that rollouts share counts once."""
    rollouts = pack["rollouts"]
    shared = dict(zip(rollouts["prefix"].tolist(), rollouts["prompt_length"].tolist(), strict=True))
    return int((rollouts["length"] - rollouts["prompt_length"]).sum()) + sum(shared.values())
