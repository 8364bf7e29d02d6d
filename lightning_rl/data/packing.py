"""From rollouts to one packed TensorDict, and from that to minibatches and token-budget packs.

A *batch* is a TensorDict with two parts:

- ``batch["tokens"]``, batch size [T]: the full trajectories, one after another without padding.
  ``input_ids``, ``loss_mask``, ``rollout_logprobs``, ``versions``; later steps add
  ``old_logprobs``, ``ref_logprobs``, ``values``, ``advantages``, ``returns``, ``loss_weights``.
  ``no_end``, where any rollout had ``min_tokens``: the engine could not end at this token.
  ``turn_start``, where any had a penalty: where in its rollout the turn begins that a token is in.
  Where any recorded its calls, ``call``: the number of the call that wrote the token, in the order
  of its rollout's calls; ``call_reward``: the call's, on its last token, else 0; ``state``: calls
  of a group in the same state have the same number, -1 without. Outside of calls they are -1, 0
  and -1. Where any recorded its ``routed_experts``, these, (T, L, K) of L layers with K experts a
  token; -1 where they are not known.
- ``batch["rollouts"]``, batch size [R], one for each row of a rollout: ``length`` and
  ``prompt_length`` in tokens, ``prefix`` (rows with the same number have the same prompt: tokens,
  pictures and the experts these were sent to), ``group``, ``rollout`` (rows with the same number
  are one rollout's), ``episode`` (and those are written by one role, too: they share its reward,
  and count once), ``role``, ``reward``, ``truncated``, ``expert`` (given, not sampled) and how it
  was sampled: ``temperature``, ``top_k``, ``top_p``, and where any rollout had them ``min_p`` and
  ``repetition_``, ``presence_`` and ``frequency_penalty``. Where any branched off from another,
  ``sample`` (of a group, those with the same number began as one) and ``fork`` (how many calls they
  share, 0 for the one they branched off from; those have no loss).
- ``batch["pictures"]``, where any row has pictures: the table of those
  (:class:`~lightning_rl.vision.batch.PictureTable`), and in ``rollouts`` each row's place in it.
- ``batch["host"]``, in an update on a GPU: the columns that decide how packs are laid out, once
  more on the CPU (:func:`with_host`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data import routing
from lightning_rl.data.calls import call_columns
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Placed, Rollout, Row
from lightning_rl.run.dist import gather, rank, world_size
from lightning_rl.vision.batch import NAME as PICTURES, as_column, picture_columns

_column = partial(torch.tensor, device="cpu")  # also where another device is the default


class PackedBatch(TensorDict):
    """Packed rollouts: ``tokens`` [N] of all of them, and ``rollouts`` [R], without a batch size.

    It has no ``next`` and no slices, as a rollout is none of its tokens; asked for them, as by
    torchrl's buffers and losses, it says what to call.

    Raises:
        ConfigError: for ``len``, for an index, and for a key that torchrl's batches have.
    """

    def __len__(self) -> int:
        raise _no_view("a length")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str | tuple):
            _require_own(index)
        elif index is not Ellipsis:
            raise _no_view(f"[{index!r:.40}]")
        return super().__getitem__(index)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """As a TensorDict's."""
        _require_own(key)
        return super().get(key, *args, **kwargs)


_TORCHRLS = {
    "action", "action_log_prob", "advantage", "done", "next", "observation", "reward",
    "sample_log_prob", "state_value", "terminated", "value_target",
}  # fmt: skip


def _require_own(key: Any) -> None:
    first = key[0] if isinstance(key, tuple) and key else key
    if isinstance(first, str) and first in _TORCHRLS:
        raise _no_view(repr(first))


def _no_view(what: str) -> ConfigError:
    return ConfigError(
        f"a packed batch of language models has no {what}: "
        "lightning_rl.extend.as_torchrl(batch) has a row for each rollout, as_steps(batch) one for "
        "each token, with next, action, a batch size"
    )


def pack_rollouts(
    rollouts: Sequence[Rollout], among: Sequence[Rollout] = (), roles: Sequence[str] = ()
) -> TensorDict:
    """Pack graded rollouts, each with a token after its prompt at least, into a batch, in order.

    Groups are numbered as they come, or as they came ``among`` all that were collected: then a
    group that was lost leaves its number unused, and the others have theirs on any number of ranks.
    Roles are numbered by their places in ``roles``; without any, those that there are in the order
    of their names.

    Raises:
        ConfigError: if one was held to a form, so that its tokens cannot be scored, or was written
            by another role than ``roles``.
        DataError: if one recorded its calls, but not all that its model wrote, or some twice.
    """
    _require_scorable(rollouts)
    sources = packed_rows(rollouts)
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    prefixes: dict[tuple[tuple[int, ...], tuple[Placed, ...], str], int] = {}
    groups: dict[str, int] = {}
    for rollout in among:
        groups.setdefault(rollout.group_id, len(groups))
    numbered: dict[int, int] = {}
    episodes: dict[tuple[int, str], int] = {}
    number_of = {name: number for number, name in enumerate(_roles_of(sources, roles))}
    numbers: list[tuple[int, ...]] = []
    for rollout, row in sources:
        prompt = row.prompt_ids
        # The first prompt token is predicted by nothing, so a loss mask never covers prompts.
        input_ids += prompt + row.token_ids
        loss_mask += [False] * len(prompt) + row.loss_mask
        logprobs += [0.0] * len(prompt) + row.logprobs
        versions += [-1] * len(prompt) + row.versions
        numbers.append(
            (
                len(prompt) + len(row.token_ids),
                len(prompt),
                prefixes.setdefault(_read_alike(row), len(prefixes)),
                groups.setdefault(rollout.group_id, len(groups)),
                numbered.setdefault(id(rollout), len(numbered)),
                episodes.setdefault((id(rollout), row.role), len(episodes)),
                number_of[row.role],
            )
        )
    names = ("length", "prompt_length", "prefix", "group", "rollout", "episode", "role")
    columns = zip(*numbers, strict=True)
    counted = {n: _column(c, dtype=torch.long) for n, c in zip(names, columns, strict=True)}
    if any(rollout.fork for rollout in rollouts):
        forks = [(r.sample_index, r.fork.calls if r.fork else 0) for r, _ in sources]
        for name, column in zip(("sample", "fork"), zip(*forks, strict=True), strict=True):
            counted[name] = _column(column, dtype=torch.long)
    tables: dict[str, Any] = {}
    if (found := picture_columns([row for _, row in sources])) is not None:
        counted[PICTURES], tables[PICTURES] = _column(found[0]), as_column(found[1])
    sampled, sampled_by = call_columns(rollouts), {}
    lengths = [row.length for _, row in sources]
    experts = routing.column([row.routed_experts for _, row in sources], lengths)
    if experts is not None:
        sampled["routed_experts"] = experts
    sampling = [row.sampling or rollout.sampling for rollout, row in sources]
    if any(s.min_tokens for s in sampling):
        rows = zip(sources, sampling, strict=True)
        flags = [flag for (_, row), s in rows for flag in _no_end(row, s.min_tokens)]
        sampled["no_end"] = _column(flags, dtype=torch.bool)
    if any(s.min_p for s in sampling):
        sampled_by["min_p"] = _column([s.min_p for s in sampling])
    if any(s.penalizes for s in sampling):
        starts = [start for _, row in sources for start in _turn_starts(row)]
        sampled["turn_start"] = _column(starts, dtype=torch.long)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            sampled_by[name] = _column([float(getattr(s, name)) for s in sampling])
    for name, dtype in (
        ("temperature", torch.float32),
        ("top_k", torch.long),
        ("top_p", torch.float32),
    ):
        sampled_by[name] = _column([getattr(s, name) for s in sampling], dtype=dtype)
    truncated = [rollout.finish_reason == "length" for rollout, _ in sources]
    rewards = [rollout.reward_of(row.role) for rollout, row in sources]
    return PackedBatch(
        {
            "tokens": TensorDict(
                {
                    "input_ids": _column(input_ids, dtype=torch.long),
                    "loss_mask": _column(loss_mask, dtype=torch.bool),
                    "rollout_logprobs": _column(logprobs, dtype=torch.float32),
                    "versions": _column(versions, dtype=torch.long),
                    **sampled,
                },
                batch_size=[len(input_ids)],
            ),
            "rollouts": TensorDict(
                {
                    **counted,
                    "truncated": _column(truncated, dtype=torch.bool),
                    "reward": _column(rewards, dtype=torch.float32),
                    "expert": _column([r.expert for r, _ in sources], dtype=torch.bool),
                    **sampled_by,
                },
                batch_size=[len(sources)],
            ),
            **tables,
        },
        batch_size=[],
    )


def _roles_of(sources: Sequence[tuple[Rollout, Row]], known: Sequence[str]) -> Sequence[str]:
    """All roles in the order of their numbers."""
    found = sorted({row.role for _, row in sources})
    if known and (unknown := [role for role in found if role not in known]):
        raise ConfigError(
            f"rollouts have tokens of role {unknown[0]!r}, which no policy plays; model.policies "
            f"play {', '.join(known)}: name it in the roles of one"
        )
    return known or found


def packed_rows(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Row]]:
    """The rows of a batch, each with its rollout: those with tokens after their prompts."""
    return [(rollout, row) for rollout in rollouts for row in rollout.own_rows() if row.token_ids]


def _read_alike(row: Row) -> tuple[tuple[int, ...], tuple[Placed, ...], str]:
    """Equal for rows whose prompts are one in a pack: same tokens, pictures and choice of experts.

    In 16 bits an engine may read one prompt in two batches with another rounding.
    """
    count = len(row.prompt_ids)
    shown = tuple(one for one in row.placed if one.start < count)
    return tuple(row.prompt_ids), shown, routing.beginning(row.routed_experts, count)


def _require_scorable(rollouts: Sequence[Rollout]) -> None:
    held = next((r for r in rollouts if r.structured and not r.expert), None)
    if held is not None:
        raise ConfigError(
            f"rollout {held.id!r} was held to sampling.structured_outputs: which tokens were "
            "allowed where, the trainer does not know, so it cannot score them; use "
            "structured_outputs in eval_sampling only, or train on such completions by SFT or DPO"
        )


def _turn_starts(row: Row) -> list[int]:
    """Of each token, prompt included, where its turn begins, counted from the row's start."""
    begin = len(row.prompt_ids)
    starts = [0] * begin
    for place, mine in enumerate(row.loss_mask, begin):
        if not mine:
            begin = place + 1
        starts.append(begin)
    return starts


def _no_end(row: Row, least: int) -> list[bool]:
    """Flags of the tokens, prompt included, among the first ``least`` of a turn."""
    flags, written = [False] * len(row.prompt_ids), 0
    for mine in row.loss_mask:
        written = written + 1 if mine else 0
        flags.append(0 < written <= least)
    return flags


def token_rows(batch: TensorDict) -> Tensor:
    """The row of ``batch["rollouts"]`` that each token belongs to, shape (T,)."""
    length = batch["rollouts", "length"]
    rows = torch.arange(len(length), device=length.device)
    # Told the size of the result, a GPU's host need not wait for it.
    return torch.repeat_interleave(rows, length, output_size=batch["tokens"].batch_size[0])


def tokens_of_rows(length: Tensor, rows: Tensor) -> Tensor:
    """Indices of the tokens of these rows (r,), in their order, of rows of such lengths (R,)."""
    return ranges((length.cumsum(0) - length)[rows], length[rows])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """[a..a + m), [b..b + n), ... concatenated, for starts (a, b, ...) and lengths (m, n, ...)."""
    offsets = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(len(offsets), device=lengths.device) + offsets


def episode_rows(batch: TensorDict) -> Tensor:
    """The episode of each row, shape (R,); in a batch made by hand each may be one of its own."""
    rollouts = batch["rollouts"]
    if "episode" in rollouts:
        found: Tensor = rollouts["episode"]
        return found
    return torch.arange(len(rollouts), device=rollouts["length"].device)


def host_of(batch: TensorDict) -> TensorDict:
    """The columns that decide a batch's layout, on the CPU: ``loss_mask`` and a few others.

    It is ``batch["host"]``, or the batch itself if it is on the CPU, or else copied anew, for which
    a GPU's host waits.
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


_LAYOUT = ("length", "prompt_length", "prefix", "expert", "temperature", "top_k", "top_p", "min_p")


def with_host(batch: TensorDict) -> TensorDict:
    """A batch that holds its :func:`host_of`, unless it is on the CPU: for all that is cut of it.

    So the host waits once per batch, and not for each pack. Later changes of the columns concerned
    are not seen.
    """
    host = host_of(batch)
    if host is batch or "host" in batch:
        return batch
    return PackedBatch({**_parts(batch), "host": host}, batch_size=[])


def _parts(batch: TensorDict) -> dict[str, Any]:
    """Its tokens, its rollouts, and what they share."""
    shared = {PICTURES: as_column(batch[PICTURES])} if PICTURES in batch else {}
    return {"tokens": batch["tokens"], "rollouts": batch["rollouts"], **shared}


def select(batch: TensorDict, rows: Tensor) -> TensorDict:
    """The sub-batch of the given rollouts (indices, shape (r,)), in that order."""
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


def has_zero_advantage(batch: TensorDict) -> Tensor:
    """Flags, (R,), of rollouts that are sampled and have no advantage on any loss token."""
    tokens = batch["tokens"]
    idle = ~batch["rollouts", "expert"]
    idle[token_rows(batch)[(tokens["advantages"] != 0) & tokens["loss_mask"]]] = False
    return idle


def without(batch: TensorDict, left_out: Tensor) -> TensorDict:
    """The other rollouts than those ``left_out`` (R,); if none is, the first, without loss tokens.

    Its gradient is zero, and not missing: the optimizer steps as ever, together with other ranks.
    """
    return empty_like(batch) if left_out.all() else select(batch, (~left_out).nonzero().squeeze(1))


def without_flags(flags: Tensor, left_out: Tensor) -> Tensor:
    """What ``flags`` (R,), on the host, are of :func:`without`'s batch."""
    left_out = left_out.cpu()
    nothing = torch.zeros(1, dtype=torch.bool, device="cpu")
    return nothing if left_out.all() else flags[~left_out]


def empty_like(batch: TensorDict) -> TensorDict:
    """A rollout without loss tokens, as a pack for a rank that has none left.

    It is the first; of a batch that has none, one is made up.
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
    """Two tokens, the second of which nobody wrote, with the columns of a batch."""
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


def split_minibatches(batch: TensorDict, count: int, generator: torch.Generator) -> list[Tensor]:
    """Deal whole groups at random into ``count`` minibatches of rollout indices.

    Several ranks, which call it together with generators in one state, deal the groups of all of
    them, as one process would: so a rank may have more of its groups in one minibatch than in
    another, or none.

    Raises:
        ConfigError: if there are fewer groups than minibatches.
    """
    group = batch["rollouts", "group"].cpu()
    if count == 1:
        return [torch.arange(len(group), device="cpu")]
    # Ranks take turns with the groups of an iteration, and that gives each its place.
    place = group * world_size() + rank()
    places = sorted(chain.from_iterable(gather(place.unique().tolist())))
    if len(places) < count:
        raise ConfigError(
            f"minibatches={count} exceeds the {len(places)} groups of this batch; "
            "lower minibatches or raise groups_per_iteration"
        )
    parts = deal_groups(torch.tensor(places, device="cpu"), count, generator)
    return [torch.isin(place, part).nonzero().squeeze(1) for part in parts]


def deal_groups(places: Tensor, count: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Deal the places of groups at random into ``count`` minibatches, as evenly as can be."""
    if count == 1:
        return [places]
    order = places[torch.randperm(len(places), generator=generator, device="cpu")]
    return order.tensor_split(count)


def split_packs(batch: TensorDict, max_tokens: int) -> list[Tensor]:
    """Cut a batch into packs of at most ``max_tokens`` forward tokens, as rollout indices.

    A shared prompt is counted once per pack. Longer rollouts come first, so that neighbours have
    like lengths; rollouts with one prompt stay neighbours. A rollout longer than the budget gets a
    pack of its own.
    """
    rollouts = host_of(batch)["rollouts"]
    length, prompt_length, prefix = (
        rollouts[name].tolist() for name in ("length", "prompt_length", "prefix")
    )
    longest: dict[int, int] = {}
    for p, n in zip(prefix, length, strict=True):
        longest[p] = max(longest.get(p, 0), n)
    order = sorted(range(len(length)), key=lambda i: (-longest[prefix[i]], prefix[i], -length[i]))
    packs: list[list[int]] = []
    used, seen = max_tokens, set[int]()
    for i in order:
        suffix = length[i] - prompt_length[i]
        cost = suffix if prefix[i] in seen else length[i]
        if used + cost > max_tokens:
            packs.append([])
            used, seen, cost = 0, set(), length[i]
        packs[-1].append(i)
        seen.add(prefix[i])
        used += cost
    return [torch.tensor(sorted(pack), device="cpu") for pack in packs]
