"""GameUpdate: what players make of a game's losses, and the moves that come of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.algos.losses import Metrics, PolicyLoss, Surrogate
from lightning_rl.games.algos.game import GamePoint, Levels


@dataclass(frozen=True)
class Move:
    """What a game update makes of a player's gradient.

    Args:
        own: the gradient of its own loss, (D,).
        added: what the update adds for the others' sake, (D,).
        kept: how much of that, a scalar in [0, 1].
    """

    own: Tensor
    added: Tensor
    kept: Tensor

    @property
    def direction(self) -> Tensor:
        """To step against, (D,)."""
        return self.own + self.kept * self.added

    @property
    def metrics(self) -> dict[str, Tensor]:
        """How many times as long as its own gradient the added term is, and whether it was cut.

        Both (1,); without a gradient of its own the first is 0.
        """
        length = self.own.norm()
        share = torch.where(length > 0, self.added.norm() / length, 0.0)
        cut = (self.kept < 1).float()
        return {"policy/shaping": share.reshape(1), "policy/shaping_cut": cut.reshape(1)}


class GameUpdate(ABC):
    """Makes of a game's losses a direction for each player, to step against.

    Losses may be exact, or means over steps in an environment; :meth:`step_loss` is of a step.

    ``needs_order``: it is made for players of whom some lead others. ``factors``: how many
    estimates it multiplies, each of which is made of a part of the episodes; None: as many as there
    are levels. ``zero_at_zero_advantage``: the loss of a step without advantage is 0.
    """

    needs_order: ClassVar[bool] = False
    factors: ClassVar[int | None] = None
    zero_at_zero_advantage: bool = True

    @abstractmethod
    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        """A direction (D_i,) for each player; ``draw`` is for what is random in it."""

    def moves(self, game: GamePoint, draw: torch.Generator) -> list[Move]:
        """The same, with what directions are made of."""
        directions, own = self(game, draw), own_gradients(game)
        one = own[0].new_ones(())
        return [Move(o, d - o, one) for d, o in zip(directions, own, strict=True)]

    def parts(self, levels: Levels | None, players: int) -> int:
        """How many parts the episodes are cut into for players of these levels."""
        if self.factors is not None:
            return self.factors
        if players == 1:
            return 1  # nobody has anybody in view
        return 2 if levels is None else len(levels)

    def step_loss(self, logprobs: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Loss (M,) and metrics of steps, of the log probability (M,) of all that was done in each.

        -A p / sg(p) has the policy gradient and all its derivatives (Foerster et al. 2018, DiCE);
        of -A log p only the first is right.
        """
        return called(Surrogate(), logprobs, {**tokens, "old_logprobs": logprobs.detach()})


def own_gradients(game: GamePoint) -> list[Tensor]:
    """nabla_i L_i of each player, (D_i,)."""
    return [game.gradient(i, i).detach() for i in range(len(game.players))]


def called(loss: PolicyLoss, logprobs: Tensor, tokens: Any) -> tuple[Tensor, Metrics]:
    """A loss of steps, which it reads by name alone."""
    return loss(logprobs, tokens)
