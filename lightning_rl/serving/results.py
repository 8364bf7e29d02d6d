"""The result of an agent's run: its ending, and the values that it reports."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.rewards.log import as_plain
from lightning_rl.rewards.parts import LARGEST_REWARD
from lightning_rl.rollout import Message, Rollout
from lightning_rl.run.files.strict_json import require_plain

RESULT_KEYS = ("reward", "role_rewards", "call_rewards", "metrics", "answer")
"""A line of output is a result if it has one of these keys."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The ending of a run: ``done`` or one of ``agents.endings``, a failure's reason, the result.

    ``completion`` becomes the rollout's; None: the session's transcript. Tokens of the roles in
    ``untrained`` have no loss.
    """

    kind: str
    reason: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)
    completion: list[Message] | None = None
    untrained: Collection[str] = ()


def last_result(output: bytes) -> dict[str, Any]:
    """Return the last line that is a JSON object with one of ``RESULT_KEYS``; {} if none is."""
    for line in reversed(output.splitlines()):
        if not line.lstrip().startswith(b"{"):
            continue
        try:
            value = json.loads(line, parse_int=_whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and not value.keys().isdisjoint(RESULT_KEYS):
            return value
    return {}


def note_result(rollout: Rollout, said: Mapping[str, Any]) -> None:
    """Write an agent's result into its rollout.

    ``reward`` becomes the ``environment_reward``, ``role_rewards`` the rewards of roles (by name),
    ``call_rewards`` those of calls (in order, None for a call without one), ``metrics`` are logged;
    everything else is kept in ``extra``.

    Raises:
        ValueError: for an invalid value, which it names; the rollout is then unchanged.
    """
    require_plain(said)
    reward = said.get("reward")
    rewards = None if reward is None else _number("reward", reward)
    roles = _numbers("role_rewards", said.get("role_rewards"), LARGEST_REWARD)
    metrics = _numbers("metrics", said.get("metrics"))
    known = {row.role for row in rollout.rows if row.token_ids}
    if unknown := roles.keys() - known:
        raise ValueError(f"role_rewards names {sorted(unknown)}; roles that wrote: {sorted(known)}")
    calls = said.get("call_rewards") or []
    if calls and (not isinstance(calls, list) or len(calls) != len(rollout.calls)):
        raise ValueError(
            f"call_rewards={calls!r:.80} must be a list of {len(rollout.calls)}, one per call"
        )
    of_calls = [
        None if paid is None else _number("call_rewards", paid, LARGEST_REWARD) for paid in calls
    ]
    rollout.environment_reward = rewards
    rollout.role_rewards |= roles
    rollout.logged |= metrics
    for call, paid in zip(rollout.calls, of_calls, strict=False):  # none, or one for each
        call.reward = paid
    others = said.keys() - {"reward", "role_rewards", "call_rewards", "metrics"}
    rollout.extra |= {key: as_plain(said[key]) for key in sorted(others)}


def _numbers(name: str, said: Any, largest: float = math.inf) -> dict[str, float]:
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise ValueError(f"{name}={said!r:.80} must be an object of numbers by name")
    return {str(key): _number(f"{name}.{key}", value, largest) for key, value in said.items()}


def _number(name: str, said: Any, largest: float = math.inf) -> float:
    try:
        number = float(said) if isinstance(said, bool | int | float) else math.nan
    except OverflowError:
        raise ValueError(f"{name} is a number beyond float64; it must be a finite one") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={said!r:.80} must be a finite number")
    if abs(number) > largest:
        raise ValueError(
            f"{name}={said!r:.80} must be within ±{largest:g}, as batches hold float32"
        )
    return number


def _whole(digits: str) -> int | float:
    """Parse a number of any length: Python's ``int`` refuses long ones."""
    return int(digits) if len(digits) < 400 else float(digits)
