"""Does a tree of rollouts give a better gradient than as many tokens in rollouts side by side?

    python -m benchmarks.branching [--groups 10000] [--save]

On two games of `support/games.py`, with known values and a known gradient of the expected
reward: `walk`, in which what was lucky is soon over; and `plan`, in which the first turn decides
most, and is noise to what comes after it. Groups are collected in several ways: games from the
start side by side; or some of them, from which others branch off before their second turn. Rewards
are paid at the end, and each turn is a generated token. A group's gradient is the sum over its
turns of advantage times the gradient of the turn's log probability, divided by its games from the
start.

- ``tokens``: turns that a group had generated, on average;
- ``noise``: the variance of one group's gradient over the squared length of its expectation, times
  tokens: what is left of it is the same for equally many generated tokens;
- ``cosine``: of its mean and the exact gradient;
- ``sigmas``: how far the mean is from the exact gradient, in standard errors, over all weights of
  the policy; about 1 if it is unbiased. GRPO divides by standard deviations, so it has none.

The last line is JSON: ``noise_over_grpo_<game>``, the least noise of TreeRLOO's ways over that of
GRPO with about as many tokens in a group, and the figures of each. ``--save`` also writes the table
of docs/branching.md. Takes about two minutes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.games import PLAN, WALK, Game, Turns, command, noise_of
from lightning_rl import GRPO, RLOO, TreeRLOO
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.extend import Advantage
from lightning_rl.rollout import Fork, Rollout

PAGE = Path(__file__).parents[1] / "docs" / "branching.md"
GAMES = {"walk": WALK, "plan": PLAN}
FORK = 1
"""Turns that a branch shares with its game."""


@dataclass(frozen=True)
class Way:
    """A way to collect and credit a group: ``k`` branches off each of so many ``games``."""

    advantage: Advantage
    games: int
    k: int = 0


WAYS: dict[str, Way] = {
    "GRPO, 4 games": Way(GRPO(), 4),
    "GRPO, 12 games": Way(GRPO(), 12),
    "RLOO, 4 games": Way(RLOO(), 4),
    "RLOO, 12 games": Way(RLOO(), 12),
    "TreeRLOO, 4 games with 2 branches": Way(TreeRLOO(), 4, 2),
    "TreeRLOO, 6 games with 1 branch": Way(TreeRLOO(), 6, 1),
}


@dataclass
class Forest:
    """Games and those that branched off, in the order of their batch.

    ``fields`` and ``actions`` (N, turns) are as :meth:`Game.played` has them, what was shared
    included; ``origin`` (N, 4): group, sample, turns that are shared, and which branch.
    """

    game: Game
    fields: Tensor
    actions: Tensor
    origin: Tensor

    @property
    def own_fields(self) -> Tensor:
        """Return the fields before the turns that were generated; else -1."""
        return torch.where(torch.arange(self.game.turns) >= self.origin[:, 2:3], self.fields, -1)

    def rollouts(self) -> list[Rollout]:
        made = self.game.recorded(self.fields, self.actions, at_end=True)
        told = zip(made, self.origin.tolist(), strict=True)
        for rollout, (group, sample, shared, number) in told:
            rollout.group_id, rollout.sample_index = str(group), sample
            rollout.fork = Fork(shared, number, 0) if shared else None
        return made


def collected(
    game: Game, way: Way, logits: Tensor, groups: int, generator: torch.Generator
) -> Forest:
    """Collect so many groups."""
    number = torch.arange(groups * way.games)
    fields, actions = game.played(logits, game.begun(len(number)), generator)
    nothing = torch.zeros_like(number)
    origin = torch.stack([number // way.games, number % way.games, nothing, nothing], 1)
    parts = [(fields, actions, origin)]
    there = fields[:, FORK] >= 0
    for branch in range(way.k):
        later = game.played(logits, fields[there, FORK], generator, FORK)
        whole_fields, whole_actions = (
            torch.cat([before[there, :FORK], after], 1)
            for before, after in zip((fields, actions), later, strict=True)
        )
        began = origin[there] + torch.tensor([0, 0, FORK, branch])
        parts.append((whole_fields, whole_actions, began))
    fields, actions, origin = (torch.cat(part) for part in zip(*parts, strict=True))
    group, sample, shared, branch_ = origin.T
    order = (((group * way.games + sample) * 2 + shared) * (way.k + 1) + branch_).argsort()
    return Forest(game, fields[order], actions[order], origin[order])


def measure(
    game: Game, way: Way, logits: Tensor, exact: Tensor, groups: int, generator: torch.Generator
) -> dict[str, float]:
    """Measure tokens per group, noise, cosine and sigmas."""
    forest = collected(game, way, logits, groups, generator)
    batch = way.advantage(pack_rollouts(forest.rollouts()))
    credit = batch["tokens", "advantages"][batch["tokens", "loss_mask"]].double()
    group = forest.origin[:, 0]
    turns = Turns.of(game, logits, forest.own_fields, forest.actions, group)
    found = noise_of(turns.gradients(credit, way.games), exact)
    tokens = len(credit) / groups
    if isinstance(way.advantage, GRPO):
        del found["sigmas"]
    return found | {"tokens": tokens, "noise": found["noise"] * tokens}


def run(groups: int, seed: int) -> dict[str, Any]:
    result: dict[str, Any] = {"groups": groups}
    for title, game in GAMES.items():
        generator = torch.Generator().manual_seed(seed)
        logits, expected, exact = game.policy(generator)
        found = {}
        print(f"\n{title:36}{'tokens':>8}{'noise':>8}{'cosine':>8}{'sigmas':>8}")
        for name, way in WAYS.items():
            row = found[name] = measure(game, way, logits, exact, groups, generator)
            sigmas = f"{row['sigmas']:8.2f}" if "sigmas" in row else ""
            print(f"{name:36}{row['tokens']:8.1f}{row['noise']:8.1f}{row['cosine']:8.3f}{sigmas}")
        ours = min(found[name]["noise"] for name in found if name.startswith("TreeRLOO"))
        result[f"noise_over_grpo_{title}"] = ours / found["GRPO, 12 games"]["noise"]
        result[title] = {"expected_reward": expected, "ways": found}
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown with tokens per group, noise, and sigmas of both games."""
    return [
        "| group | walk: tokens | noise | off by | plan: tokens | noise | off by |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | " + " | ".join(_cells(result[game]["ways"][name]) for game in GAMES) + " |"
            for name in WAYS
        ),
    ]


def _cells(row: dict[str, float]) -> str:
    sigmas = f"{row['sigmas']:.1f}" if "sigmas" in row else "biased"
    return f"{row['tokens']:.1f} | {row['noise']:.0f} | {sigmas}"


if __name__ == "__main__":
    command(__doc__, "branching", PAGE, run, table)
