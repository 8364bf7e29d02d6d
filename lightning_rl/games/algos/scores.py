"""ScoreGame: a game whose losses are functions of the log probabilities of the players' actions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_rl.games.algos.game import GamePoint, Levels, derived


class GamePlayer(ABC):
    """A player with parameters theta (D,), seen through the log probabilities l(theta), (M,), of
    its actions.

    The Jacobian J = dl / dtheta, (M, D), is never formed as a whole.
    """

    @abstractmethod
    def own(self) -> Tensor:
        """Return the gradient (D,) of the player's own loss.

        It may include terms that log probabilities do not show, such as an entropy bonus.
        """

    @abstractmethod
    def gradient(self, weights: Tensor) -> Tensor:
        """Return J^T w, (D,), for weights (M,): the gradient of the weighted sum of log
        probabilities.
        """

    @abstractmethod
    def along(self, vector: Tensor) -> Tensor:
        """Return J v, (M,): the rate of change of log probabilities along ``vector`` (D,)."""

    @abstractmethod
    def bend(self, weights: Tensor, change: Tensor, vector: Tensor) -> Tensor:
        """Return J^T c + sum_t w_t nabla^2 l_t v, (D,).

        This is how fast J^T w changes as theta moves along ``vector`` v, and w along ``change`` c,
        (M,).
        """


@dataclass(frozen=True)
class ScoreGame(GamePoint):
    """A game at a point whose losses are functions of log probabilities.

    By the chain rule, with l_i (M_i,) and J_i of each player, and no parameters shared by two,

    - nabla_i L = J_i^T dL / dl_i
    - nabla_j <v, nabla_i L> = J_j^T (d^2 L / dl_j dl_i) J_i v, and for j = i in addition
      sum_t dL / dl_i,t nabla^2 l_i,t v.

    So only losses are differentiated twice, as functions of as many numbers as there are actions;
    players only give gradients of weighted sums, and slopes along a direction. With losses from
    :func:`~lightning_rl.games.algos.moves.game_loss` these are the estimates of Loaded DiCE
    (Farquhar et al. 2019), in which d^2 L / dl_j dl_i J_i v is an action's advantage times the
    change along v of the joint log probability of all that the other player did before.

    Args:
        losses: L_i of each player, twice differentiable in all ``logprobs``.
        logprobs: l_i of each player, (M_i,); leaves that require a gradient.
        players: each gives derivatives by its own parameters.
        rates: eta_i, the size of each player's gradient step: a number, or one per parameter,
            (D_i,).
        order: who leads whom; None: every player anticipates all others.
    """

    losses: Sequence[Tensor]
    logprobs: Sequence[Tensor]
    players: Sequence[GamePlayer]
    rates: Sequence[float | Tensor]
    order: Levels | None = None
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def gradient(self, of: int, by: int) -> Tensor:
        """Return nabla_by L_of, (D_by,)."""
        if (of, by) not in self._gradients:
            player = self.players[by]
            alone = of == by
            found = player.own() if alone else player.gradient(self._slope(of, by).detach())
            self._gradients[of, by] = found
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """Return nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,)."""
        slope = self._slope(of, first)
        moved = slope @ self.players[first].along(vector).to(slope.dtype)
        through = derived(moved, [self.logprobs[then]], create_graph=False)
        if then != first:
            return self.players[then].gradient(through)
        return self.players[first].bend(slope.detach(), through, vector)

    def _slope(self, of: int, by: int) -> Tensor:
        """Return dL_of / dl_by, (M_by,), with a graph."""
        return derived(self.losses[of], [self.logprobs[by]], create_graph=True)
