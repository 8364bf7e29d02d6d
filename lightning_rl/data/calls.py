"""The calls of rollouts, as columns of a packed batch's tokens."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl.errors import DataError
from lightning_rl.rollout import Call, Rollout, Row


def call_columns(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return ``call``, ``call_reward`` and ``state`` (T,), if any rollout recorded its calls.

    A rollout without recorded calls has those that its loss mask shows. The reward of a call
    without trained tokens is omitted: like any reward that no call got, it falls on the last call.

    Raises:
        DataError: if a rollout recorded calls, but its model wrote a token that is in none of them,
            or in two.
    """
    if not any(rollout.calls for rollout in rollouts):
        return {}
    marks = _Marks()
    for rollout in rollouts:
        by_row: defaultdict[int, list[tuple[int, Call]]] = defaultdict(list)
        for number, call in enumerate(rollout.model_calls()):
            by_row[call.row].append((number, call))
        for place, row in enumerate(rollout.own_rows()):
            if row.token_ids:
                marks.add(rollout, row, by_row[place])
    return {
        "call": torch.tensor(marks.call, dtype=torch.long, device="cpu"),
        "call_reward": torch.tensor(marks.reward, dtype=torch.float32, device="cpu"),
        "state": torch.tensor(marks.state, dtype=torch.long, device="cpu"),
    }


class _Marks:
    """Builds the three columns, row by row."""

    def __init__(self) -> None:
        self.call: list[int] = []
        self.reward: list[float] = []
        self.state: list[int] = []
        self._states: dict[tuple[str, str], int] = {}  # by group and name

    def add(self, rollout: Rollout, row: Row, calls: Sequence[tuple[int, Call]]) -> None:
        begin, end = len(self.call) + len(row.prompt_ids), len(row.token_ids)
        total = begin + end
        self.call += [-1] * (total - len(self.call))
        self.reward += [0.0] * (total - len(self.reward))
        self.state += [-1] * (total - len(self.state))
        for number, call in calls:
            written = [
                begin + t for t in range(call.start, min(call.stop, end)) if row.loss_mask[t]
            ]
            state = -1
            if call.state is not None:
                state = self._states.setdefault((rollout.group_id, call.state), len(self._states))
            for token in written:
                if self.call[token] >= 0:
                    _refuse(rollout, token - begin, "two of them")
                self.call[token], self.state[token] = number, state
            if written:
                self.reward[written[-1]] = call.reward or 0.0
        for place, mine in enumerate(row.loss_mask):
            if mine and self.call[begin + place] < 0:
                _refuse(rollout, place, "none of them")


def _refuse(rollout: Rollout, place: int, where: str) -> None:
    raise DataError(
        f"rollout {rollout.id!r} recorded {len(rollout.calls)} calls, but token {place} after the "
        f"prompt, which its model wrote, is in {where}; record a Call for each stretch of tokens "
        "that the model wrote, or none at all"
    )
