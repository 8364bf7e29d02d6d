"""Rollouts of several turns, made by hand or at random, with what each turn was paid and where."""

import random

import torch
from tensordict import TensorDict

from lightning_rl.rollout import Call, Prompt, Rollout, RolloutStatus, Row

Turn = tuple[str | None, int, float | None]
"""State, number of tokens, and reward."""


def played(turns: list[Turn], reward: float, **fields) -> Rollout:
    """Make a prompt of one token and turns of 4s, with an environment's token, 3, between two."""
    rollout = Rollout(
        Prompt("p", "text", [2]),
        **({"group_id": "g", "sample_index": 0, "seed": 0} | fields),
    )
    rollout.status, rollout.finish_reason = RolloutStatus.COMPLETED, "stop"
    rollout.reward = reward
    for state, size, paid in turns:
        [row] = rollout.rows
        row.append_given([3] * bool(row.token_ids))
        begin = len(row.token_ids)
        row.append_written([4] * size, [-1.0] * size, [0] * size)
        rollout.calls.append(Call(0, begin, begin + size, reward=paid, state=state))
    return rollout


def random_episodes(seed: int, groups: int = 4, group_size: int = 3) -> list[Rollout]:
    """Up to five calls each, in up to three rows, which calls visit in any order."""
    rng, rollouts = random.Random(seed), []
    for place in range(groups * group_size):
        rollout = played([], rng.randint(0, 4) / 4, group_id=str(place // group_size))
        rollout.sample_index = place % group_size
        rollout.rows += [Row([2, 3]) for _ in range(rng.randint(0, 2))]
        rows, used = rollout.rows, set()
        for number in range(rng.randint(1, 5)):
            at = rng.choice([*used, min(len(used), len(rows) - 1)])
            used.add(at)
            row, size = rows[at], rng.randint(1, 3)
            given = rng.randint(1, 2) if row.token_ids else 0
            row.append_given([3] * given)
            row.append_written([4 + number] * size, [-1.0] * size, [0] * size)
            stop = len(row.token_ids)
            paid = rng.choice([None, 0.0, 0.25, -0.5, 0.1])
            rollout.calls.append(
                Call(at, stop - size, stop, reward=paid, state=rng.choice(["s", "t"]))
            )
        rollout.rows = [rows[0], *(row for row in rows[1:] if row.token_ids)]
        rollouts.append(rollout)
    return rollouts


def with_values(batch: TensorDict) -> TensorDict:
    """Add a critic's values, at random."""
    generator = torch.Generator().manual_seed(3)
    batch["tokens", "values"] = torch.randn(len(batch["tokens"]), generator=generator)
    return batch
