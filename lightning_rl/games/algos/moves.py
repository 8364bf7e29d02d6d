"""GameUpdate: losses of a game from played steps, and the players' update directions of them."""

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
    """A player's update direction, and what it is made of.

    Args:
        own: the gradient of its own loss, (D,).
        added: the term that the update adds because of the other players, (D,).
        kept: the share of that term that is kept, a scalar in [0, 1].
    """

    own: Tensor
    added: Tensor
    kept: Tensor

    @property
    def direction(self) -> Tensor:
        """The direction to step against, (D,)."""
        return self.own + self.kept * self.added

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The length of the added term relative to the player's own gradient, and whether it was
        cut.

        Both are of shape (1,); the first is 0 if the player's own gradient is.
        """
        length = self.own.norm()
        share = torch.where(length > 0, self.added.norm() / length, 0.0)
        cut = (self.kept < 1).float()
        return {"policy/shaping": share.reshape(1), "policy/shaping_cut": cut.reshape(1)}


class GameUpdate(ABC):
    """Turns the losses of a game into a direction for each player to step against.

    Losses may be exact, or means over steps in an environment; :meth:`step_loss` is that of a step.

    ``needs_order``: the update is for players of whom some lead others. ``factors``: how many
    estimates it multiplies, each from another part of the episodes; None: one per level.
    ``zero_at_zero_advantage``: the loss of a step with advantage 0 is 0.
    """

    needs_order: ClassVar[bool] = False
    factors: ClassVar[int | None] = None
    zero_at_zero_advantage: bool = True

    @abstractmethod
    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        """Return a direction (D_i,) for each player; ``draw`` generates the update's random
        numbers.
        """

    def moves(self, game: GamePoint, draw: torch.Generator) -> list[Move]:
        """Return the same directions, split into the player's own gradient and the added term."""
        directions, own = self(game, draw), own_gradients(game)
        one = own[0].new_ones(())
        return [Move(o, d - o, one) for d, o in zip(directions, own, strict=True)]

    def parts(self, levels: Levels | None, players: int) -> int:
        """Return how many parts the episodes are cut into for players with these levels."""
        if self.factors is not None:
            return self.factors
        if players == 1:
            return 1  # nobody has anybody in view
        return 2 if levels is None else len(levels)

    def step_loss(self, logprobs: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Return loss (M,) and metrics of steps, given the joint log probability (M,) of all
        actions.

        -A p / sg(p), where sg stops gradients, has all derivatives of the policy objective
        (Foerster et al. 2018, DiCE); for -A log p only the first derivative is right.
        """
        return called(Surrogate(), logprobs, {**tokens, "old_logprobs": logprobs.detach()})


def own_gradients(game: GamePoint) -> list[Tensor]:
    """Return nabla_i L_i of each player, (D_i,)."""
    return [game.gradient(i, i).detach() for i in range(len(game.players))]


def called(loss: PolicyLoss, logprobs: Tensor, tokens: Any) -> tuple[Tensor, Metrics]:
    """Call a loss on steps, whose columns it reads only by name."""
    return loss(logprobs, tokens)


def said_before(logprobs: Tensor, begins: Tensor) -> Tensor:
    """Sum the log probabilities of earlier steps of the same episode, (E, T).

    ``logprobs`` (E, T) are joint over all players in each step; ``begins`` (E, T) is True where an
    episode begins. The first column counts as the beginning of one.
    """
    assert logprobs.shape == begins.shape and logprobs.ndim == 2
    before = logprobs.cumsum(1) - logprobs
    steps = torch.arange(logprobs.shape[1], device=logprobs.device)
    begun = torch.where(begins, steps, 0).cummax(1).values
    return before - before.gather(1, begun)


def game_loss(step_losses: Tensor, before: Tensor) -> Tensor:
    """Return a player's mean loss, a scalar with the derivatives of its expectation in all players'
    parameters.

    ``step_losses`` (E, T) are functions of the actions in each step, as
    :meth:`~lightning_rl.games.GameUpdate.step_loss` returns them, and ``before`` (E, T) comes from
    :func:`said_before`. For steps l_t the loss is the mean of l_t + (e^(before - sg(before)) - 1)
    (l_t - sg(l_t)). With l_t = -A_t p_t / sg(p_t) and scores S of players f and g its gradient is
    -A_t S_f,t, and its mixed derivative -A_t (S_f,t S_g,<=t + S_f,<t S_g,t): each player's action
    interacts with all that the other did before (Farquhar et al. 2019, Loaded DiCE).
    """
    assert step_losses.shape == before.shape and before.ndim == 2
    past = (before - before.detach()).exp()
    fixed = step_losses.detach()
    return (fixed + past * (step_losses - fixed)).mean()
