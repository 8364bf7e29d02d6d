"""Flags of a recorded rollout: problems that were found in it."""

import math
from collections.abc import Callable
from typing import Any

from lightning_rl.data.rollouts.rows import rows_of

GAP_NATS = 0.5
"""Engine and trainer logprobs differ by 1e-6 in float32 and by up to 2e-2 in bfloat16."""

FLAGS = {
    "mask": "the loss mask covers a token that no model version wrote",
    "gap": f"engine and trainer logprobs of a token differ by more than {GAP_NATS} nats",
    "version": "a token was written by older weights than the token before it",
    "number": "a per-token number is not finite, or a logprob is above 0",
    "lengths": "per-token lists differ in length",
    "reward": "the reward or one of its parts is missing or not finite",
    "failed": "the rollout failed, or carries an error",
}

Record = dict[str, Any]


def find_flags(record: Record) -> dict[str, list[int]]:
    """Return the flags that apply by name, each with the positions of the tokens it concerns.

    A flag about the rollout as a whole has no positions; those of a row continue after the rows
    before it. ``record`` is a line of ``recorded.jsonl`` or ``rollouts.jsonl``.
    """
    result: dict[str, list[int]] = {}
    rows, begin = rows_of(record), 0
    for row in rows:
        for name, check in _TOKEN_CHECKS.items():
            if tokens := check(row):
                result.setdefault(name, []).extend(begin + token for token in tokens)
        begin += len(row["token_ids"])
    if any(_length(row, name) != len(row["token_ids"]) for row in rows for name in _PER_TOKEN):
        result["lengths"] = []
    rewards = [record.get("reward"), *record.get("reward_parts", {}).values()]
    finite = (isinstance(reward, int | float) and math.isfinite(reward) for reward in rewards)
    if record["status"] == "completed" and not all(finite):
        result["reward"] = []
    if record["status"] == "failed" or record.get("error"):
        result["failed"] = []
    return result


def _mask(record: Record) -> list[int]:
    if record.get("demonstration"):  # a given completion: nothing wrote it, and it is learned from
        return []
    pairs = zip(record["loss_mask"], record["versions"], strict=False)
    return [i for i, (mask, version) in enumerate(pairs) if mask and version < 0]


def gaps(record: Record) -> list[tuple[int, float]]:
    """Return the positions in a row of tokens that both engine and trainer score, and the gaps in
    nats.
    """
    trainer = record.get("trainer_logprobs")
    if trainer is None or record.get("demonstration"):
        return []
    rows = zip(record["loss_mask"], record["logprobs"], trainer, strict=False)
    return [(i, abs(a - b)) for i, (mask, a, b) in enumerate(rows) if mask]


def _gap(record: Record) -> list[int]:
    return [i for i, gap in gaps(record) if gap > GAP_NATS]


def _version(record: Record) -> list[int]:
    newest, places = -1, []
    for i, version in enumerate(record["versions"]):
        if 0 <= version < newest:
            places.append(i)
        newest = max(newest, version)
    return places


def _number(record: Record) -> list[int]:
    tokens = set()
    for name in _PER_TOKEN:
        for i, value in enumerate(record.get(name) or ()):
            too_high = name.endswith("logprobs") and value > 1e-4
            if too_high or not math.isfinite(value):
                tokens.add(i)
    return sorted(tokens)


def _length(record: Record, name: str) -> int:
    """Return the length of a per-token list; one that was not recorded counts as right."""
    values = record.get(name)
    return len(record["token_ids"] if values is None else values)


_PER_TOKEN = (
    "loss_mask",
    "logprobs",
    "versions",
    "trainer_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
)
_TOKEN_CHECKS: dict[str, Callable[[Record], list[int]]] = {
    "mask": _mask,
    "gap": _gap,
    "version": _version,
    "number": _number,
}
