"""Games: losses that each depend on all players' parameters, and how a move changes others'.

A game at a point is n losses L_i, scalars, and the parameters of n players: lists of tensors, of
D_i numbers together. Gradients, and what is made of them, are flat vectors (D_i,).
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
"""Of a point, a follower f and a vector v (D_f,): A_f v, if f moves by A_f times what its gradient
changes.

A follower that takes a gradient step of size eta has A = -eta; one that goes on to its optimum has
A = -(the Hessian of its loss)^-1."""


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """One vector (D,) of them all."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def derived(value: Tensor, by: Sequence[Tensor], create_graph: bool) -> Tensor:
    """Gradient (D,) of a scalar; 0 where it does not depend on a number."""
    if not value.requires_grad:
        return torch.zeros_like(flat(by))
    return flat(
        torch.autograd.grad(
            value, by, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )
    )


class GamePoint(ABC):
    """A game at a point, as far as updates look at it: derivatives, and what they make together.

    ``players`` are as many as there are losses; ``rates`` are eta_i, of each one's gradient step: a
    number, or one for each parameter, (D_i,); ``order`` is who leads whom; None: everyone all
    others.
    """

    players: Sequence[Any]
    rates: Sequence[float | Tensor]
    order: Levels | None
    estimated: ClassVar[bool] = False
    """Whether derivatives are estimates, of episodes that were played."""

    @abstractmethod
    def gradient(self, of: int, by: int) -> Tensor:
        """nabla_by L_of, (D_by,)."""

    @abstractmethod
    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,).

        It is a block of the Hessian of L_of, times the vector.
        """

    def apart(self, factors: int) -> Sequence[Sequence["GamePoint"]]:
        """Points of which derivatives may be multiplied: in each of some turns ``factors`` of them.

        What turns come to is averaged. A game that is known exactly has one turn, and is itself
        every point of it; of one that is estimated see :class:`CrossFitted`.
        """
        return [[self] * factors]

    def followers(self, player: int) -> Levels:
        """Those that answer to what a player does, level by level."""
        if self.order is None:
            others = [other for other in range(len(self.players)) if other != player]
            return [others] if others else []
        place = next(n for n, level in enumerate(self.order) if player in level)
        return self.order[place + 1 :]

    def foresight(self, leader: int, rates: Sequence[float | Tensor]) -> Tensor:
        """What the steps of its followers change in its own gradient, (D_leader,).

        -h = -sum over followers f of nabla_leader <eta_f nabla_f L_f, nabla_f L_leader>: its
        followers are looked upon as where they will be (Zhang and Lesser 2010, LookAhead).
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
        """What it gains by how its own move changes those of its followers, (D_leader,).

        -chi = sum over followers f of <A_f nabla_f L_leader, d nabla_f L_f / d theta_leader>. With
        :meth:`gradient` it is the total derivative of L_leader by theta_leader. Each factor is of a
        point of its own, and A_f of that of the vector that it is multiplied by.
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
        """<vector, d nabla_f L_f / d theta_leader>: directly, and by way of the levels between."""
        point, *others = points
        total = point.mixed(follower, follower, leader, vector)
        for above, level in enumerate(self.followers(leader)[:depth]):
            for between in level:
                moved = answer(point, between, point.mixed(follower, follower, between, vector))
                total = total + self._pulled(leader, above, between, moved, answer, others)
        return total


@dataclass(frozen=True)
class Game(GamePoint):
    """A game at a point, and derivatives of its losses there.

    Args:
        losses: L_i of each player, twice differentiable in the parameters of all.
        players: each one's parameters; no tensor is of two.
        rates: eta_i, of each player's gradient step: a number, or one for each parameter, (D_i,).
        order: who leads whom; None: everyone all others.
    """

    losses: Sequence[Tensor]
    players: Sequence[Sequence[Tensor]]
    rates: Sequence[float | Tensor]
    order: Levels | None = None
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def gradient(self, of: int, by: int) -> Tensor:
        """nabla_by L_of, (D_by,), with a graph."""
        if (of, by) not in self._gradients:
            self._gradients[of, by] = derived(self.losses[of], self.players[by], create_graph=True)
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """nabla_then <vector, nabla_first L_of>, (D_then,), for ``vector`` (D_first,)."""
        slope = self.gradient(of, first) @ vector
        return derived(slope, self.players[then], create_graph=False)


@dataclass(frozen=True)
class CrossFitted(GamePoint):
    """A game that is known by estimates, each of them from episodes that no other has seen.

    The product of two estimates from the same N episodes is not an estimate of the product: with
    A the advantages and S the scores of players f and g in an episode, E[M^T v] is (1 - 1/N) times
    what it should be, plus E[A_f A_g |S_f|^2 S_g] / N. So no two factors of :meth:`foresight` and
    :meth:`shaping` come from one part; parts change places in turns, which are averaged
    (cross-fitting, Chernozhukov et al. 2018). Sums are of all parts.

    Args:
        parts: the same game, estimated from each part of the episodes.
        shares: how much of the episodes each part has; together 1.
        own: nabla_i L_i of each player, (D_i,), if it is known from all episodes; None: the mean.
    """

    parts: Sequence[GamePoint]
    shares: Sequence[float]
    own: Sequence[Tensor] | None = None
    estimated: ClassVar[bool] = True
    _gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def players(self) -> Sequence[Any]:  # type: ignore[override]
        """As the first part has them."""
        return self.parts[0].players

    @property
    def rates(self) -> Sequence[float | Tensor]:  # type: ignore[override]
        """As the first part has them."""
        return self.parts[0].rates

    @property
    def order(self) -> Levels | None:  # type: ignore[override]
        """As the first part has it."""
        return self.parts[0].order

    def apart(self, factors: int) -> Sequence[Sequence[GamePoint]]:
        """In turn k the parts k, k + 1, ...

        Raises:
            ConfigError: for more factors than parts.
        """
        count = len(self.parts)
        if factors > count:
            raise ConfigError(
                f"a product of {factors} estimates needs as many parts of the episodes, and they "
                f"are in {count}; set factors of the update to {factors}"
            )
        return [[self.parts[(k + j) % count] for j in range(factors)] for k in range(count)]

    def gradient(self, of: int, by: int) -> Tensor:
        """nabla_by L_of, (D_by,), from all episodes."""
        if of == by and self.own is not None:
            return self.own[of]
        if (of, by) not in self._gradients:
            self._gradients[of, by] = self._mean(part.gradient(of, by) for part in self.parts)
        return self._gradients[of, by]

    def mixed(self, of: int, first: int, then: int, vector: Tensor) -> Tensor:
        """nabla_then <vector, nabla_first L_of>, (D_then,), from all episodes."""
        return self._mean(part.mixed(of, first, then, vector) for part in self.parts)

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        weighted = [share * v for share, v in zip(self.shares, values, strict=True)]
        return torch.stack(weighted).sum(0)


def nystrom_solve(
    product: Callable[[Tensor], Tensor], vector: Tensor, columns: Tensor, rho: float
) -> Tensor:
    """(H_k + rho I)^-1 v, (D,), for a symmetric H that is known by its products with vectors.

    H_k = C H_KK^-1 C^T is Nystrom's approximation of H from k of its columns, C (D, k), and their
    rows of it, H_KK (k, k); then (H_k + rho I)^-1 = (I - C (rho H_KK + C^T C)^-1 C^T) / rho
    (Hataya and Yamada 2023). It is exact if H has rank k at most, and H_KK the same.

    Args:
        product: of H with a vector.
        vector: v, (D,).
        columns: K, which of them, (k,).
        rho: what H is damped with.
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
