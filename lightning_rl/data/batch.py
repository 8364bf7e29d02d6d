"""A packed batch of rollouts: what it holds, and the batches of some of its rows.

A *batch* is a TensorDict with two parts:

- ``batch["tokens"]``, batch size [T]: the full trajectories, one after another without padding.
  ``input_ids``, ``loss_mask``, ``rollout_logprobs``, ``versions``; later steps add
  ``old_logprobs``, ``ref_logprobs``, ``values``, ``advantages``, ``returns``, ``loss_weights``.
  ``no_end``, if any rollout had ``min_tokens``: the engine could not end at this token.
  ``turn_start``, if any had a penalty: where in its rollout the token's turn begins. If any
  recorded its calls, ``call``: the number of the call that wrote the token, in the order of its
  rollout's calls; ``call_reward``: the call's, on its last token, else 0; ``state``: calls of a
  group in the same state have the same number, -1 without. Outside calls they are -1, 0 and -1. If
  any recorded its ``routed_experts``, these, (T, L, K) for L layers with K experts per token; -1
  where unknown. If a teacher has looked at any, ``teacher_logprobs``, NaN where it has not, and of
  its K likeliest tokens, if it told them, ``teacher_ids`` (T, K), -1 where unknown, and their
  logprobs ``teacher_top`` (T, K).
- ``batch["rollouts"]``, batch size [R], one for each row of a rollout: ``length`` and
  ``prompt_length`` in tokens, ``prefix`` (rows with the same number have the same prompt: tokens,
  pictures and the experts these were sent to), ``group``, ``rollout`` (rows with the same number
  are one rollout's), ``episode`` (and those are written by one role, too: they share its reward,
  and count once), ``role``, ``reward``, ``truncated``, ``demonstration`` (given, not sampled) and
  how it was sampled: ``temperature``, ``top_k``, ``top_p``, and where any rollout had them
  ``min_p`` and ``repetition_``, ``presence_`` and ``frequency_penalty``. ``reward_parts`` and
  ``part_weights``, (R, P): the scores of the reward functions in the order of their names, NaN
  where there is none, then the rest of the reward, such as a role's own; their weighted sum is
  ``reward``. What a group's plan compares rows with, by its names (such as ``baseline``), NaN where
  it is unknown. Where any branched off from another, ``sample`` (of a group, those with the same
  number began as one) and
  ``fork`` (how many calls they share, 0 for the one they branched off from; those have no loss).
- ``batch["pictures"]``, where any row has pictures: the table of those
  (:class:`~lightning_rl.vision.batch.PictureTable`), and in ``rollouts`` each row's place in it.
- ``batch["host"]``, in an update on a GPU: the columns that decide how micro-batches are laid out,
  once more on the CPU (:func:`with_host`).
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data import routing
from lightning_rl.errors import ConfigError
from lightning_rl.vision.batch import NAME as PICTURES, as_column


class PackedBatch(TensorDict):
    """Packed rollouts: ``tokens`` [N] of all of them, and ``rollouts`` [R], without a batch size.

    It has no length and no slices, since its parts have different lengths; when torchrl's buffers
    ask for them, the error says what to call instead.

    Raises:
        ConfigError: for ``len``, and for an index.
    """

    def __len__(self) -> int:
        raise _no_view("a length")

    def __getitem__(self, index: Any) -> Any:
        if not (isinstance(index, str | tuple) or index is Ellipsis):
            raise _no_view(f"[{index!r:.40}]")
        return super().__getitem__(index)


def _no_view(what: str) -> ConfigError:
    return ConfigError(
        f"a packed batch of language models has no {what}: "
        "lightning_rl.extend.as_torchrl(batch) has a row for each rollout, as_steps(batch) one for "
        "each token, with next, action, a batch size"
    )


def token_rows(batch: TensorDict) -> Tensor:
    """Return the row of ``batch["rollouts"]`` that each token belongs to, shape (T,)."""
    length = batch["rollouts", "length"]
    rows = torch.arange(len(length), device=length.device)
    # Told the size of the result, a GPU's host need not wait for it.
    return torch.repeat_interleave(rows, length, output_size=batch["tokens"].batch_size[0])


def tokens_of_rows(length: Tensor, rows: Tensor) -> Tensor:
    """Return the token indices of these rows (r,), in their order, for row lengths (R,)."""
    return ranges((length.cumsum(0) - length)[rows], length[rows])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate [a..a + m), [b..b + n), ..., for starts (a, b, ...) and lengths (m, n, ...)."""
    offsets = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(len(offsets), device=lengths.device) + offsets


def episode_rows(batch: TensorDict) -> Tensor:
    """Return the episode of each row, shape (R,); a batch made by hand may have one per row."""
    rollouts = batch["rollouts"]
    if "episode" in rollouts:
        result: Tensor = rollouts["episode"]
        return result
    return torch.arange(len(rollouts), device=rollouts["length"].device)


def _parts(batch: TensorDict) -> dict[str, Any]:
    """Return its tokens, its rollouts, and what they share."""
    shared = {PICTURES: as_column(batch[PICTURES])} if PICTURES in batch else {}
    return {"tokens": batch["tokens"], "rollouts": batch["rollouts"], **shared}


def select(batch: TensorDict, rows: Tensor) -> TensorDict:
    """Return the sub-batch of the given rows (indices, shape (r,)), in that order."""
    length, rows = host_of(batch)["rollouts", "length"], rows.cpu()
    if len(rows) == len(length) and torch.equal(rows, torch.arange(len(length), device="cpu")):
        return batch
    tokens = tokens_of_rows(length, rows)
    device = batch["tokens", "loss_mask"].device
    chosen = {
        **_parts(batch),
        "tokens": batch["tokens"][tokens.to(device, non_blocking=True)],
        "rollouts": batch["rollouts"][rows.to(device, non_blocking=True)],
    }
    if "host" in batch:
        chosen["host"] = select(batch["host"], rows)
    return PackedBatch(chosen, batch_size=[])


def empty_like(batch: TensorDict) -> TensorDict:
    """Return a rollout without loss tokens, as a micro-batch for a rank that has none left.

    It is a copy of the first, or made up if the batch has none.
    """
    if not len(batch["rollouts"]):
        return _made_up(batch)
    first = select(batch, torch.zeros(1, dtype=torch.long, device="cpu")).copy()
    for part in (first, first["host"]) if "host" in first else (first,):
        part["tokens", "loss_mask"] = torch.zeros_like(part["tokens", "loss_mask"])
    return first


_SILENT = {"length": 2, "prompt_length": 1, "temperature": 1, "top_p": 1, "repetition_penalty": 1}
_OUTSIDE = {"call": -1, "state": -1, "picture": -1, "routed_experts": routing.UNKNOWN}


def _made_up(batch: TensorDict) -> TensorDict:
    """Make a rollout of two tokens outside the loss, with the columns of a batch."""
    tokens = {
        name: x.new_full((2, *x.shape[1:]), _OUTSIDE.get(name, 0))
        for name, x in batch["tokens"].items()
    }
    rollouts = {
        name: x.new_full((1, *x.shape[1:]), _SILENT.get(name, 0))
        for name, x in batch["rollouts"].items()
    }
    made: dict[str, Any] = {
        **_parts(batch),
        "tokens": TensorDict(tokens, batch_size=[2]),
        "rollouts": TensorDict(rollouts, batch_size=[1]),
    }
    if "host" in batch:
        made["host"] = _made_up(batch["host"])
    return TensorDict(made, batch_size=[])


def host_of(batch: TensorDict) -> TensorDict:
    """Return the columns that decide a batch's layout, on the CPU: ``loss_mask`` and a few others.

    It is ``batch["host"]``, the batch itself if it is on the CPU, or else a new copy, for which the
    host waits for the GPU.
    """
    if "host" in batch:
        return batch["host"]
    loss_mask, rollouts = batch["tokens", "loss_mask"], batch["rollouts"]
    if loss_mask.device.type == "cpu":
        return batch
    columns = [name for name in _LAYOUT if name in rollouts]
    # float64 holds them all: in one copy the host waits once.
    copied = torch.stack([rollouts[name].double() for name in columns]).cpu()
    found = {
        name: column.to(rollouts[name].dtype) for name, column in zip(columns, copied, strict=True)
    }
    return TensorDict(
        {
            "tokens": TensorDict({"loss_mask": loss_mask.cpu()}, batch_size=loss_mask.shape),
            "rollouts": TensorDict(found, batch_size=rollouts.batch_size),
        },
        batch_size=[],
    )


_LAYOUT = (
    "length",
    "prompt_length",
    "prefix",
    "demonstration",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
)


def with_host(batch: TensorDict) -> TensorDict:
    """Return a batch that holds its :func:`host_of`, unless it is on the CPU, for its sub-batches.

    The host then waits once per batch instead of once per micro-batch. Later changes of these
    columns are not seen.
    """
    host = host_of(batch)
    if host is batch or "host" in batch:
        return batch
    return PackedBatch({**_parts(batch), "host": host}, batch_size=[])
