"""Packs rollouts into one TensorDict, whose contents :mod:`lightning_rl.data.batch` documents."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, count
from math import fsum, nan
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data import routing, teacher_logprobs
from lightning_rl.data.batch import PackedBatch
from lightning_rl.data.calls import call_columns
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Placed, Rollout, Row, SamplingDistribution
from lightning_rl.vision.batch import NAME as PICTURES, as_column, picture_columns

Sources = Sequence[tuple[Rollout, Row]]
"""The rows of a batch in order, each with its rollout."""


def pack_rollouts(
    rollouts: Sequence[Rollout], among: Sequence[Rollout] = (), roles: Sequence[str] = ()
) -> TensorDict:
    """Pack graded rollouts, each with at least one token after its prompt, into a batch, in order.

    Groups are numbered in the order of ``among``, all collected rollouts, or else of ``rollouts``:
    a group that was lost leaves its number unused, and the others have the same numbers on any
    number of ranks. Roles are numbered by their places in ``roles``, or else in the order of their
    names.

    Raises:
        ConfigError: if one was sampled with constrained output, so that its tokens cannot be
            scored, or has a role that is not in ``roles``.
        DataError: if one recorded calls that miss some of its model's tokens, or overlap.
    """
    _require_scorable(rollouts)
    sources = packed_rows(rollouts)
    rows = [row for _, row in sources]
    lengths, prompts = [row.length for row in rows], [len(row.prompt_ids) for row in rows]
    experts = routing.column([row.routed_experts for row in rows], lengths)
    sampling = [row.sampling or rollout.sampling for rollout, row in sources]
    tokens = {
        **_token_columns(rows),
        **call_columns(rollouts, sum(lengths)),
        **({} if experts is None else {"routed_experts": experts}),
        **_condition_columns(rows, sampling),
        **teacher_logprobs.columns([row.teacher_logprobs for row in rows], prompts, lengths),
    }
    of_rows = {
        **_number_columns(sources, among, roles),
        **_fork_columns(rollouts, sources),
        **_outcome_columns(sources),
        **_compared_columns(rows),
        **_part_columns(sources),
        **_sampling_columns(sampling),
    }
    tables: dict[str, Any] = {}
    if (found := picture_columns(rows)) is not None:
        of_rows[PICTURES], tables[PICTURES] = _column(found[0], np.int64), as_column(found[1])
    return PackedBatch(
        {
            "tokens": TensorDict(tokens, batch_size=[len(tokens["input_ids"])]),
            "rollouts": TensorDict(of_rows, batch_size=[len(rows)]),
            **tables,
        },
        batch_size=[],
    )


def packed_rows(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Row]]:
    """Return the rows of a batch, those with tokens after their prompts, each with its rollout."""
    return [(rollout, row) for rollout in rollouts for row in rollout.own_rows() if row.token_ids]


def _require_scorable(rollouts: Sequence[Rollout]) -> None:
    held = next((r for r in rollouts if r.structured and not r.demonstration), None)
    if held is not None:
        raise ConfigError(
            f"rollout {held.id!r} was constrained by sampling.structured_outputs: the trainer does "
            "not know which tokens were allowed where, so it cannot score them; use "
            "structured_outputs in data.evaluation only, or train on such completions by SFT or DPO"
        )


def _column(numbers: Sequence[float], kind: type) -> Tensor:
    """Make a tensor on the CPU, even if another device is the default."""
    return torch.from_numpy(np.array(numbers, dtype=kind))  # in a third of torch.tensor's time


# ---------------------------------------------------------------- columns of tokens, (T,)


def _token_columns(rows: Sequence[Row]) -> dict[str, Tensor]:
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for row in rows:
        prompt = row.prompt_ids
        # The first prompt token is predicted by nothing, so a loss mask never covers prompts.
        input_ids += prompt + row.token_ids
        loss_mask += [False] * len(prompt) + row.loss_mask
        logprobs += [0.0] * len(prompt) + row.logprobs
        versions += [-1] * len(prompt) + row.versions
    return {
        "input_ids": _column(input_ids, np.int64),
        "loss_mask": _column(loss_mask, np.bool_),
        "rollout_logprobs": _column(logprobs, np.float32),
        "versions": _column(versions, np.int64),
    }


def _condition_columns(
    rows: Sequence[Row], sampling: Sequence[SamplingDistribution]
) -> dict[str, Tensor]:
    """Return columns for settings whose effect depends on the tokens before, in a turn."""
    columns = {}
    if any(s.min_tokens for s in sampling):
        flags = map(_no_end, rows, (s.min_tokens for s in sampling))
        columns["no_end"] = _column([*chain.from_iterable(flags)], np.bool_)
    if any(s.penalizes for s in sampling):
        starts = chain.from_iterable(map(_turn_starts, rows))
        columns["turn_start"] = _column([*starts], np.int64)
    return columns


def _no_end(row: Row, least: int) -> list[bool]:
    """Flag the tokens, prompt included, that are among the first ``least`` of a turn."""
    flags, written = [False] * len(row.prompt_ids), 0
    for mine in row.loss_mask:
        written = written + 1 if mine else 0
        flags.append(0 < written <= least)
    return flags


def _turn_starts(row: Row) -> list[int]:
    """Return where each token's turn begins, prompt included, counted from the row's start."""
    begin = len(row.prompt_ids)
    starts = [0] * begin
    for index, mine in enumerate(row.loss_mask, begin):
        if not mine:
            begin = index + 1
        starts.append(begin)
    return starts


# ---------------------------------------------------------------- columns of rows, (R,)


def _number_columns(
    sources: Sources, among: Sequence[Rollout], roles: Sequence[str]
) -> dict[str, Tensor]:
    """Return lengths, and the numbers that say which rows belong together."""
    number_of = {name: number for number, name in enumerate(_roles_of(sources, roles))}
    columns = {
        "length": [row.length for _, row in sources],
        "prompt_length": [len(row.prompt_ids) for _, row in sources],
        "prefix": _numbered(_read_alike(row) for _, row in sources),
        "group": _numbered((r.group_id for r, _ in sources), (r.group_id for r in among)),
        "rollout": _numbered(id(rollout) for rollout, _ in sources),
        "episode": _numbered((id(rollout), row.role) for rollout, row in sources),
        "role": [number_of[row.role] for _, row in sources],
    }
    return {name: _column(column, np.int64) for name, column in columns.items()}


def _numbered(keys: Iterable[Hashable], before: Iterable[Hashable] = ()) -> list[int]:
    """Number keys by their first occurrence, in ``before`` or else among themselves."""
    number: defaultdict[Hashable, int] = defaultdict(count().__next__)
    for key in before:
        number[key]  # takes the next number
    return [number[key] for key in keys]


def _read_alike(row: Row) -> tuple[tuple[int, ...], tuple[Placed, ...], str]:
    """Return a key that is equal for rows whose prompts are one in a micro-batch.

    These have the same tokens, pictures and routed experts; in 16 bits an engine may round one
    prompt differently in two batches, and route it to other experts.
    """
    length = len(row.prompt_ids)
    shown = tuple(one for one in row.placed if one.start < length)
    return tuple(row.prompt_ids), shown, routing.beginning(row.routed_experts, length)


def _roles_of(sources: Sequence[tuple[Rollout, Row]], known: Sequence[str]) -> Sequence[str]:
    """Return all roles in the order of their numbers."""
    found = sorted({row.role for _, row in sources})
    if known and (unknown := [role for role in found if role not in known]):
        raise ConfigError(
            f"rollouts have tokens of role {unknown[0]!r}, which no policy plays; model.policies "
            f"play {', '.join(known)}: name it in the roles of one"
        )
    return known or found


def _fork_columns(rollouts: Sequence[Rollout], sources: Sources) -> dict[str, Tensor]:
    if not any(rollout.fork for rollout in rollouts):
        return {}
    calls = [rollout.fork.calls if rollout.fork else 0 for rollout, _ in sources]
    return {
        "sample": _column([rollout.sample_index for rollout, _ in sources], np.int64),
        "fork": _column(calls, np.int64),
    }


def _outcome_columns(sources: Sources) -> dict[str, Tensor]:
    truncated = [rollout.finish_reason == "length" for rollout, _ in sources]
    rewards = [rollout.reward_of(row.role) for rollout, row in sources]
    return {
        "truncated": _column(truncated, np.bool_),
        "reward": _column(rewards, np.float32),
        "demonstration": _column([rollout.demonstration for rollout, _ in sources], np.bool_),
    }


def _compared_columns(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return a column of each number that plans compare rows with; NaN where a row has none."""
    names = sorted({name for row in rows for name in row.compared_with})
    return {
        name: _column([row.compared_with.get(name, nan) for row in rows], np.float32)
        for name in names
    }


def _part_columns(sources: Sources) -> dict[str, Tensor]:
    """Return the scores of each row by reward function, and their weights, both (R, P)."""
    names = sorted({name for rollout, _ in sources for name in rollout.reward_weights})
    shape = len(sources), len(names) + 1
    scores = [_scores(rollout, row.role, names) for rollout, row in sources]
    weights = [
        [*(rollout.reward_weights.get(name, 0.0) for name in names), 1.0] for rollout, _ in sources
    ]
    return {
        "reward_parts": _column(list(chain(*scores)), np.float32).reshape(shape),
        "part_weights": _column(list(chain(*weights)), np.float32).reshape(shape),
    }


def _scores(rollout: Rollout, role: str, names: Sequence[str]) -> list[float]:
    """Return the scores of a role in the order of ``names``, and the rest of its reward.

    The rest is what did not come from reward functions, such as a role's own reward.
    """
    reward = rollout.role_rewards.get(role, rollout.reward)
    if reward is None or rollout.demonstration:
        return [nan] * (len(names) + 1)
    graded = {} if role in rollout.role_rewards else rollout.reward_weights
    scores = {n: s for n in graded if (s := rollout.reward_parts.get(n)) is not None}
    rest = reward - fsum(graded[name] * score for name, score in scores.items())
    return [*(scores.get(name, nan) for name in names), rest]


def _sampling_columns(sampling: Sequence[SamplingDistribution]) -> dict[str, Tensor]:
    columns: dict[str, type] = {}
    if any(s.min_p for s in sampling):
        columns["min_p"] = np.float32
    if any(s.penalizes for s in sampling):
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            columns[name] = np.float32
    columns |= {"temperature": np.float32, "top_k": np.int64, "top_p": np.float32}
    return {
        name: _column([getattr(s, name) for s in sampling], kind) for name, kind in columns.items()
    }
