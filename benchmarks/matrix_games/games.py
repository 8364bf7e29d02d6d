"""Define four games with known losses, their updates, and where these end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rl.games import LOLA, SOS, SPG, Game, GameUpdate, Simultaneous

UPDATES: dict[str, GameUpdate] = {
    "Simultaneous": Simultaneous(),
    "SPG": SPG(),
    "LOLA": LOLA(),
    "SOS": SOS(),
}
DISCOUNT = 0.96


def pennies(first: Tensor, second: Tensor) -> list[Tensor]:
    """Return losses, with logits (1,) of heads: the first wins 1 if both show the same."""
    same = ((2 * first.sigmoid() - 1) * (2 * second.sigmoid() - 1)).sum()
    return [-same, same]


def duopoly(first: Tensor, second: Tensor) -> list[Tensor]:
    """Return losses, with quantities (1,): minus what they fetch."""
    price = 1 - first - second
    return [-(price * first).sum(), -(price * second).sum()]


def tandem(first: Tensor, second: Tensor) -> list[Tensor]:
    """Return losses of two numbers (1,): the sum should be 0, and one's own large."""
    shared = (first + second).sum() ** 2
    return [shared - 2 * first.sum(), shared - 2 * second.sum()]


def dilemma(first: Tensor, second: Tensor) -> list[Tensor]:
    """Return minus discounted payoffs; logits (5,) to cooperate at the begin, CC, CD, DC and DD."""
    p, q = first.sigmoid(), second.sigmoid()[[0, 1, 3, 2, 4]]  # CD of one is DC of the other
    pairs = torch.stack([p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)], 1)
    ahead = torch.eye(4, dtype=p.dtype) - DISCOUNT * pairs[1:]
    visits = torch.linalg.solve(ahead.T, pairs[0])
    pays = torch.tensor([[-1.0, -3.0, 0.0, -2.0], [-1.0, 0.0, -3.0, -2.0]], dtype=p.dtype)
    return [-(visits @ own) for own in pays]


def coin_distance(first: Tensor, second: Tensor) -> float:
    """Return the larger distance of both probabilities from 1/2."""
    return float((torch.cat([first, second]).sigmoid() - 0.5).abs().max())


def line_distance(first: Tensor, second: Tensor) -> float:
    """Return the distance from x + y = 1."""
    return float((first + second - 1).abs())


def lead_distance(first: Tensor, second: Tensor) -> float:
    """Return the distance from the leader's best quantity and the answer to it."""
    return float(torch.cat([first - 1 / 2, second - 1 / 4]).norm())


def mean_loss(first: Tensor, second: Tensor) -> float:
    """Return the mean loss of both players in the dilemma, per step."""
    return float(torch.stack(dilemma(first, second)).mean()) * (1 - DISCOUNT)


@dataclass(frozen=True)
class Setting:
    """A game, how it is learned, and what is looked at.

    Args:
        losses: of two players' parameters.
        size: parameters of each.
        spread: starting points are normal, with this standard deviation.
        rate: of the players' steps.
        steps: how many.
        starts: starting points.
        shown: of two players' parameters.
    """

    losses: Callable[[Tensor, Tensor], list[Tensor]]
    size: int
    spread: float
    rate: float
    steps: int
    starts: int
    shown: Callable[[Tensor, Tensor], float]

    def curve(self, update: GameUpdate, start: int, steps: int) -> list[float]:
        """Measure the figure of the setting before each step and after the last one."""
        drawn = torch.Generator().manual_seed(start)
        points = self.spread * torch.randn(2, self.size, generator=drawn, dtype=torch.double)
        order = [[0], [1]] if update.needs_order else None
        curve = [self.shown(*points)]
        for _ in range(steps):
            players = [point.clone().requires_grad_() for point in points]
            game = Game(self.losses(*players), [[p] for p in players], [self.rate] * 2, order)
            points = points - self.rate * torch.stack(update(game, drawn))
            curve.append(self.shown(*points))
        return curve


SETTINGS = {
    "pennies": Setting(pennies, 1, 1.0, 0.5, 300, 3, coin_distance),
    "duopoly": Setting(duopoly, 1, 0.1, 0.1, 300, 3, lead_distance),
    "tandem": Setting(tandem, 1, 0.5, 0.1, 100, 3, line_distance),
    "dilemma": Setting(dilemma, 5, 1.0, 1.0, 200, 6, mean_loss),
}

Curves = dict[str, dict[str, list[list[float]]]]


def measured(scale: float) -> Curves:
    """Return a curve for each game, update and starting point."""
    return {
        name: {
            called: [
                game.curve(update, start, round(scale * game.steps)) for start in range(game.starts)
            ]
            for called, update in UPDATES.items()
        }
        for name, game in SETTINGS.items()
    }


def at_end(curves: Sequence[Sequence[float]]) -> float:
    """Average the last tenth's mean over starting points."""
    tails = [curve[-max(len(curve) // 10, 1) :] for curve in curves]
    return sum(sum(tail) / len(tail) for tail in tails) / len(tails)


def summary(curves: Curves) -> dict[str, Any]:
    return {
        game: {name: at_end(own) for name, own in rows.items()} for game, rows in curves.items()
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown with a line for each update."""
    rows = [
        f"| `{name}` | " + " | ".join(f"{result[game][name]:.3f}" for game in SETTINGS) + " |"
        for name in UPDATES
    ]
    head = "| update | pennies: distance | duopoly: distance | tandem: distance | dilemma: loss |"
    return [head, "|---|---|---|---|---|", *rows]
