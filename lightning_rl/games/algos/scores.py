"""ScoreGame: a game whose players are known by the log probabilities of what they did."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_rl.games.algos.game import GamePoint, Levels, derived


class GamePlayer(ABC):
    """A player with parameters theta (D,), by the log probabilities l(theta), (M,), of its actions.

    J = dl / dtheta, (M, D), is never there as a whole.
    """

    @abstractmethod
    def own(self) -> Tensor:
        """The gradient (D,) of its own loss.

        It may know more than log probabilities tell, such as an entropy.
        """

    @abstractmethod
    def gradient(self, weights: Tensor) -> Tensor:
        """J^T w, (D,), of weights (M,): the gradient of the weighted sum of log probabilities."""

    @abstractmethod
    def along(self, vector: Tensor) -> Tensor:
        """J v, (M,): how fast log probabilities change as theta moves along ``vector`` (D,)."""

    @abstractmethod
    def bend(self, weights: Tensor, change: Tensor, vector: Tensor) -> Tensor:
        """J^T c + sum_t w_t nabla^2 l_t v, (D,).

        How fast J^T w changes as theta moves along ``vector`` v and w along ``change`` c, (M,).
        """


@dataclass(frozen=True)
class ScoreGame(GamePoint):
    """A game at a point whose losses are functions of log probabilities.

    By the chain rule, with l_i (M_i,) and J_i of each player and parameters that no two share,

    - nabla_i L = J_i^T dL / dl_i
    - nabla_j <v, nabla_i L> = J_j^T (d^2 L / dl_j dl_i) J_i v, and for j = i in addition
      sum_t dL / dl_i,t nabla^2 l_i,t v.

    So losses alone are differentiated twice, as functions of numbers of which there are as many as
    actions; of players there are gradients of weighted sums, and slopes along a direction. With
    losses of :func:`~lightning_rl.games.algos.steps.game_loss` these are the estimates of Loaded
    DiCE (Farquhar et al. 2019), in which d^2 L / dl_j dl_i J_i v is an action's credit times what v
    makes of the log probability of all that the other did before.

    Args:
        losses: L_i of each player, twice differentiable in all ``logprobs``.
        logprobs: l_i of each player, (M_i,); leaves that require a gradient.
        players: what is to be known of their parameters.
        rates: eta_i, of each player's gradient step: a number, or one for each parameter, (D_i,).
        order: who leads whom; None: everyone all others.
    """

    losses: Sequence[Tensor]
    logprobs: Sequence[Tensor]
    players: Sequence[GamePlayer]
    rates: Sequence[float | Tensor]
    order: Levels | None = None
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def gradient(self, of: int, by: int) -> Tensor:
        """nabla_by L_of, (D_by,)."""
        if (of, by) not in self._gradients:
            player = self.players[by]
            alone = of == by
            found = player.own() if alone else player.gradient(self._slope(of, by).detach())
            self._gradients[of, by] = found
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,)."""
        slope = self._slope(of, first)
        moved = slope @ self.players[first].along(vector).to(slope.dtype)
        through = derived(moved, [self.logprobs[then]], create_graph=False)
        if then != first:
            return self.players[then].gradient(through)
        return self.players[first].bend(slope.detach(), through, vector)

    def _slope(self, of: int, by: int) -> Tensor:
        """dL_of / dl_by, (M_by,), with a graph."""
        return derived(self.losses[of], [self.logprobs[by]], create_graph=True)
