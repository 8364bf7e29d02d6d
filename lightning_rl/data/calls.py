"""The calls of rollouts, as columns of a packed batch's tokens."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl.errors import DataError
from lightning_rl.rollout import Call, Rollout


def call_columns(rollouts: Sequence[Rollout], total: int) -> dict[str, Tensor]:
    """Return ``call``, ``call_reward`` and ``state`` (T,), if any rollout recorded its calls.

    ``total`` is T, the number of tokens of all rows with tokens after their prompts.

    A rollout without recorded calls has those that its loss mask shows. The reward of a call
    without trained tokens is omitted: like any reward that no call got, it falls on the last call.

    Raises:
        DataError: if a rollout recorded calls, but its model wrote a token that is in none of them,
            or in two.
    """
    if not any(rollout.calls for rollout in rollouts):
        return {}
    numbers, rewards, states = [-1] * total, [0.0] * total, [-1] * total
    known: dict[tuple[str, str], int] = {}  # states by group and name
    begin = 0
    for rollout in rollouts:
        by_row: defaultdict[int, list[tuple[int, Call]]] = defaultdict(list)
        for number, call in enumerate(rollout.model_calls()):
            by_row[call.row].append((number, call))
        for index, row in enumerate(rollout.own_rows()):
            if not row.token_ids:
                continue
            begin += len(row.prompt_ids)
            for number, call in by_row[index]:
                stop = min(call.stop, len(row.token_ids))
                written = [begin + t for t in range(call.start, stop) if row.loss_mask[t]]
                state = -1
                if call.state is not None:
                    state = known.setdefault((rollout.group_id, call.state), len(known))
                for token in written:
                    if numbers[token] >= 0:
                        _refuse(rollout, token - begin, "two of them")
                    numbers[token], states[token] = number, state
                if written:
                    rewards[written[-1]] = call.reward or 0.0
            for token, mine in enumerate(row.loss_mask):
                if mine and numbers[begin + token] < 0:
                    _refuse(rollout, token, "none of them")
            begin += len(row.token_ids)
    return {
        "call": torch.tensor(numbers, dtype=torch.long, device="cpu"),
        "call_reward": torch.tensor(rewards, dtype=torch.float32, device="cpu"),
        "state": torch.tensor(states, dtype=torch.long, device="cpu"),
    }


def _refuse(rollout: Rollout, place: int, where: str) -> None:
    raise DataError(
        f"rollout {rollout.id!r} recorded {len(rollout.calls)} calls, but token {place} after the "
        f"prompt, which its model wrote, is in {where}; record a Call for each stretch of tokens "
        "that the model wrote, or none at all"
    )
