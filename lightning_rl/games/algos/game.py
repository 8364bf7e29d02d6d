"""Games: losses that depend on all players' parameters, and how one player's step changes others'.

A game at a point is n scalar losses L_i and the parameters of n players. A player's parameters
are a list of tensors with D_i numbers in total. Gradients and update directions are flat vectors
(D_i,).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_rl.errors import ConfigError

Levels = Sequence[Sequence[int]]
"""Players, level by level: each level leads all that come after it."""

Answer = Callable[["GamePoint", int, Tensor], Tensor]
"""Maps a point, a follower f and a vector v (D_f,) to A_f v, if f responds to a change g of its
gradient by moving by A_f g.

A follower that takes a gradient step of size eta has A = -eta; one that moves to its optimum has
A = -(the Hessian of its loss)^-1.
"""


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate all tensors, flattened, into one vector (D,)."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def derived(value: Tensor, by: Sequence[Tensor], create_graph: bool) -> Tensor:
    """Return the gradient (D,) of a scalar; 0 for parameters it does not depend on."""
    if not value.requires_grad:
        return torch.zeros_like(flat(by))
    return flat(
        torch.autograd.grad(
            value, by, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )
    )


class GamePoint(ABC):
    """A game at a point: the derivatives that updates need, and their combinations.

    There are as many ``players`` as losses. ``rates`` are eta_i, the size of each player's gradient
    step: a number, or one per parameter, (D_i,). ``order`` says who leads whom; None: every player
    anticipates all others.
    """

    players: Sequence[Any]
    rates: Sequence[float | Tensor]
    order: Levels | None
    estimated: ClassVar[bool] = False
    """Whether the derivatives are estimates from episodes that were played."""

    @abstractmethod
    def gradient(self, of: int, by: int) -> Tensor:
        """Return nabla_by L_of, (D_by,)."""

    @abstractmethod
    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """Return nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,).

        It is a block of the Hessian of L_of, multiplied by the vector.
        """

    def apart(self, factors: int) -> Sequence[Sequence["GamePoint"]]:
        """Return points whose derivatives may be multiplied: in each of several turns, ``factors``
        of them.

        Results are averaged over turns. A game that is known exactly has one turn, and every point
        of it is the game itself; for an estimated game see :class:`CrossFitted`.
        """
        return [[self] * factors]

    def followers(self, player: int) -> Levels:
        """Return the players that respond to this one, level by level."""
        if self.order is None:
            others = [other for other in range(len(self.players)) if other != player]
            return [others] if others else []
        place = next(n for n, level in enumerate(self.order) if player in level)
        return self.order[place + 1 :]

    def foresight(self, leader: int, rates: Sequence[float | Tensor]) -> Tensor:
        """Return how its followers' steps change its own gradient, (D_leader,).

        -h = -sum over followers f of nabla_leader <eta_f nabla_f L_f, nabla_f L_leader>: the leader
        sees its followers where they will be after their step (Zhang and Lesser 2010, LookAhead).
        """
        total = torch.zeros_like(self.gradient(leader, leader).detach())
        followers = [f for level in self.followers(leader) for f in level]
        turns = self.apart(2) if followers else []
        for ahead, here in turns:
            for follower in followers:
                step = rates[follower] * ahead.gradient(follower, follower).detach()
                total = total - here.mixed(leader, follower, leader, step)
        return total / max(len(turns), 1)

    def shaping(self, leader: int, answer: Answer) -> Tensor:
        """Return what the leader gains by changing its followers' responses, (D_leader,).

        -chi = sum over followers f of <A_f nabla_f L_leader, d nabla_f L_f / d theta_leader>. Added
        to :meth:`gradient` it is the total derivative of L_leader by theta_leader. Each factor
        comes from a different point, and A_f from the same point as the vector that it multiplies.
        """
        total = torch.zeros_like(self.gradient(leader, leader).detach())
        levels = self.followers(leader)
        turns = self.apart(1 + len(levels)) if levels else []
        for point, *others in turns:
            for depth, level in enumerate(levels):
                for follower in level:
                    moved = answer(point, follower, point.gradient(leader, follower).detach())
                    total = total + self._pulled(leader, depth, follower, moved, answer, others)
        return total / max(len(turns), 1)

    def _pulled(
        self,
        leader: int,
        depth: int,
        follower: int,
        vector: Tensor,
        answer: Answer,
        points: Sequence["GamePoint"],
    ) -> Tensor:
        """Return <vector, d nabla_f L_f / d theta_leader>, direct and through levels between."""
        point, *others = points
        total = point.mixed(follower, follower, leader, vector)
        for above, level in enumerate(self.followers(leader)[:depth]):
            for between in level:
                moved = answer(point, between, point.mixed(follower, follower, between, vector))
                total = total + self._pulled(leader, above, between, moved, answer, others)
        return total


@dataclass(frozen=True)
class Game(GamePoint):
    """A game at a point whose losses are differentiated by autograd.

    Args:
        losses: L_i of each player, twice differentiable in the parameters of all.
        players: each player's parameters; no tensor belongs to two players.
        rates: eta_i, the size of each player's gradient step: a number, or one per parameter,
            (D_i,).
        order: who leads whom; None: every player anticipates all others.
    """

    losses: Sequence[Tensor]
    players: Sequence[Sequence[Tensor]]
    rates: Sequence[float | Tensor]
    order: Levels | None = None
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def gradient(self, of: int, by: int) -> Tensor:
        """Return nabla_by L_of, (D_by,), with a graph."""
        if (of, by) not in self._gradients:
            self._gradients[of, by] = derived(self.losses[of], self.players[by], create_graph=True)
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """Return nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,)."""
        slope = self.gradient(of, first) @ vector
        return derived(slope, self.players[then], create_graph=False)


@dataclass(frozen=True)
class CrossFitted(GamePoint):
    """A game known by estimates that are multiplied only if they come from different episodes.

    The product of two estimates from the same N episodes is a biased estimate of the product: with
    advantages A and scores S of players f and g in an episode, E[M^T v] is (1 - 1/N) times
    its true value, plus E[A_f A_g |S_f|^2 S_g] / N. So no two factors of :meth:`foresight` and
    :meth:`shaping` come from the same part; parts swap places in turns, which are averaged
    (cross-fitting, Chernozhukov et al. 2018). Sums are over all parts.

    Args:
        parts: the same game, estimated from each part of the episodes.
        shares: each part's share of the episodes; they sum to 1.
        own: nabla_i L_i of each player, (D_i,), if known from all episodes; None: the mean over
            parts.
    """

    parts: Sequence[GamePoint]
    shares: Sequence[float]
    own: Sequence[Tensor] | None = None
    estimated: ClassVar[bool] = True
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def players(self) -> Sequence[Any]:  # type: ignore[override]
        """The players of the first part; all parts have the same."""
        return self.parts[0].players

    @property
    def rates(self) -> Sequence[float | Tensor]:  # type: ignore[override]
        """The rates of the first part; all parts have the same."""
        return self.parts[0].rates

    @property
    def order(self) -> Levels | None:  # type: ignore[override]
        """The order of the first part; all parts have the same."""
        return self.parts[0].order

    def apart(self, factors: int) -> Sequence[Sequence[GamePoint]]:
        """Return the parts k, k + 1, ... for turn k.

        Raises:
            ConfigError: if there are more factors than parts.
        """
        count = len(self.parts)
        if factors > count:
            raise ConfigError(
                f"a product of {factors} estimates needs as many parts of the episodes, but there "
                f"are {count}; set the update's factors to {factors}"
            )
        return [[self.parts[(k + j) % count] for j in range(factors)] for k in range(count)]

    def gradient(self, of: int, by: int) -> Tensor:
        """Return nabla_by L_of, (D_by,), from all episodes."""
        if of == by and self.own is not None:
            return self.own[of]
        if (of, by) not in self._gradients:
            self._gradients[of, by] = self._mean(part.gradient(of, by) for part in self.parts)
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """Return nabla_then <vector, nabla_first L_of>, (D_then,), from all episodes."""
        return self._mean(part.mixed(of, first, then, vector) for part in self.parts)

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        weighted = [share * v for share, v in zip(self.shares, values, strict=True)]
        return torch.stack(weighted).sum(0)


def nystrom_solve(
    product: Callable[[Tensor], Tensor], vector: Tensor, columns: Tensor, rho: float
) -> Tensor:
    """Return (H_k + rho I)^-1 v, (D,), for a symmetric H that is known by its products with
    vectors.

    H_k = C H_KK^-1 C^T is the Nystrom approximation of H from k of its columns, C (D, k), and the
    same rows of them, H_KK (k, k); then (H_k + rho I)^-1 = (I - C (rho H_KK + C^T C)^-1 C^T) / rho
    (Hataya and Yamada 2023). It is exact if H and H_KK have the same rank.

    Args:
        product: the product of H with a vector.
        vector: v, (D,).
        columns: K, the indices of the columns, (k,).
        rho: the damping of H.
    """
    assert vector.ndim == columns.ndim == 1
    units = one_hot(columns, len(vector)).to(vector.dtype)
    chosen = torch.stack([product(unit) for unit in units], 1)
    within = rho * chosen[columns] + chosen.T @ chosen
    if not bool(within.isfinite().all()):  # no inverse; whoever takes the step will leave it out
        return torch.full_like(vector, torch.nan)
    # Columns may say the same twice, or nothing: a loss that is linear in some parameters.
    inverse = torch.linalg.pinv((within + within.T) / 2, hermitian=True)
    return (vector - chosen @ (inverse @ (chosen.T @ vector))) / rho
