"""Updates for players that anticipate each other: SPG, LOLA, SOS, and their proximal variants."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.games.algos.game import GamePoint, nystrom_solve
from lightning_rl.games.algos.moves import GameUpdate, Move, called, own_gradients


@dataclass(frozen=True)
class Simultaneous(GameUpdate):
    """Each player follows its own gradient, as if the others stood still: nabla_i L_i."""

    factors: ClassVar[int | None] = 1

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return own_gradients(game)


@configurable
@dataclass(frozen=True)
class _Bounded(GameUpdate):
    """Adds to a player's own gradient a term for the others, whose length is bounded."""

    bound: float | None = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        require_finite(bound=self.bound)
        if self.bound is not None and self.bound <= 0:
            raise ConfigError(
                f"bound={self.bound} must be > 0: it limits the added term relative to the length "
                "of a player's own gradient; null for no bound"
            )

    @abstractmethod
    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        """Return the term that is added to each player's own gradient, (D_i,), before the bound."""

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return [move.direction for move in self.moves(game, draw)]

    def moves(self, game: GamePoint, draw: torch.Generator) -> list[Move]:
        added = zip(own_gradients(game), self.added(game, draw), strict=True)
        return [Move(o, a, self._kept(game, o, a)) for o, a in added]

    def _kept(self, game: GamePoint, own: Tensor, added: Tensor) -> Tensor:
        if self.bound is None or not game.estimated:
            return own.new_ones(())
        longest, length = self.bound * own.norm(), added.norm()
        return torch.where(length <= longest, 1.0, longest / length)


@configurable
@dataclass(frozen=True)
class SPG(_Bounded):
    """Stackelberg policy gradient: leaders anticipate their followers' best responses.

    A leader steps against nabla_g L_g - sum_f <(H_f + rho I)^-1 nabla_f L_g, d nabla_f L_f / d
    theta_g>, with H_f = nabla_f^2 L_f by the Nystrom approximation; the last followers step against
    their own gradients (Fiez et al. 2020; Hataya and Yamada 2023 for the inverse).

    Args:
        rank: the rank of the approximation: columns of the Hessian, drawn anew each time.
        rho: damping of the Hessian.
        bound: the largest length of the added term, relative to the player's own gradient; None:
            no bound. It is for estimates: with losses that are known exactly nothing is cut.

    Raises:
        ConfigError: if ``rank`` is less than 1, or ``rho`` or ``bound`` is not positive and finite.
    """

    rank: int = 5
    rho: float = 0.1
    needs_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, rank=self.rank)
        require_finite(rho=self.rho)
        if self.rho <= 0:
            raise ConfigError(f"rho={self.rho} must be > 0: it keeps the inverse finite; try 0.1")

    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        @cache
        def columns(follower: int, size: int) -> Tensor:
            """Return the same columns for all parts of the episodes."""
            return torch.randperm(size, generator=draw, device="cpu")[: self.rank]

        def answer(point: GamePoint, follower: int, vector: Tensor) -> Tensor:
            """Return -(H_f + rho I)^-1 v."""
            chosen = columns(follower, len(vector)).to(vector.device)

            def product(v: Tensor) -> Tensor:
                return point.mixed(follower, follower, follower, v)

            return -nystrom_solve(product, vector, chosen, self.rho)

        return [game.shaping(i, answer) for i in range(len(game.players))]


@configurable
@dataclass(frozen=True)
class LOLA(_Bounded):
    """Learning with opponent-learning awareness: each player anticipates a gradient step of the
    others.

    It follows the gradient of L_g(theta_g, theta_f - eta_f nabla_f L_f), to first order in eta:
    nabla_g L_g - sum_f eta_f (chi + h). Here h = nabla_g <nabla_f L_f, nabla_f L_g> accounts for
    where f will be, and chi = <nabla_f L_g, d nabla_f L_f / d theta_g> for how g changes that step
    (Foerster et al. 2018, LOLA; in this form Letcher et al. 2019, SOS).

    Args:
        rate: eta, the step that a player expects of the others; None: their learning rates.
        bound: the largest length of the added term, relative to the player's own gradient; None:
            no bound. It is for estimates: with losses that are known exactly nothing is cut.

    Raises:
        ConfigError: if ``rate`` or ``bound`` is not positive and finite.
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite(rate=self.rate)
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(
                f"rate={self.rate} must be > 0; to ignore the others' steps use Simultaneous"
            )

    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return [h + chi for h, chi in zip(*self._terms(game), strict=True)]

    def _terms(self, game: GamePoint) -> tuple[list[Tensor], list[Tensor]]:
        """Return -sum_f eta_f h and -sum_f eta_f chi of each player."""
        players = range(len(game.players))
        rates = game.rates if self.rate is None else [self.rate] * len(players)
        ahead = [game.foresight(i, rates) for i in players]
        return ahead, [game.shaping(i, lambda _, f, v: -rates[f] * v) for i in players]


@configurable
@dataclass(frozen=True)
class SOS(LOLA):
    """Stable opponent shaping: LOLA, limited so that it neither reverses nor moves fixed points.

    Its direction is xi_0 - p eta chi with p = min(p_1, p_2) of :func:`sos_weight`, and xi_0 =
    nabla_g L_g - sum_f eta_f h. There is less shaping near a fixed point, and where it would work
    against xi_0 (Letcher et al. 2019, algorithm 1).

    Args:
        a: how far shaping may work against xi_0, in (0, 1).
        b: length of the simultaneous gradient below which shaping fades, in (0, 1).

    Raises:
        ConfigError: if a value is out of range.
    """

    a: float = 0.5
    b: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.a < 1 and 0 < self.b < 1):
            raise ConfigError(f"SOS(a={self.a}, b={self.b}): both must be in (0, 1)")

    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        foresight, shaping = self._terms(game)
        own = torch.cat(own_gradients(game))
        ahead = own + torch.cat(foresight)
        weight = sos_weight(own, ahead, torch.cat(shaping), self.a, self.b)
        return [h + weight * s for h, s in zip(foresight, shaping, strict=True)]


def sos_weight(own: Tensor, ahead: Tensor, shaping: Tensor, a: float, b: float) -> Tensor:
    """Return p = min(p_1, p_2), a scalar, from all players' vectors concatenated, each (D,).

    With xi (``own``), xi_0 (``ahead``) and s = -eta chi (``shaping``): p_1 = 1 if <s, xi_0> >= 0,
    else min(1, -a |xi_0|^2 / <s, xi_0>), so that the update stays on xi_0's side; p_2 = |xi|^2 if
    |xi| < b, else 1, so that fixed points of xi are kept (Letcher et al. 2019, algorithm 1).
    """
    assert own.shape == ahead.shape == shaping.shape and own.ndim == 1
    along, one = shaping @ ahead, own.new_ones(())
    kept = torch.where(along < 0, -a * (ahead @ ahead) / along.clamp(max=-1e-30), one)
    squared = own @ own
    fading = torch.where(squared < b**2, squared, one)
    return torch.minimum(kept.clamp(max=1), fading)


@configurable
@dataclass(frozen=True)
class _Proximal(GameUpdate):
    """A game update on clipped ratios to the policies that collected the batch.

    So it may pass over a batch several times. With exact losses there is nothing to clip, and it
    equals the update that it is a variant of.

    Args:
        loss: applied to the joint probability ratio of all actions in a step.
    """

    loss: PolicyLoss = PPOClip()

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """True if a step with advantage 0 has loss 0, as in ``loss``."""
        return self.loss.zero_at_zero_advantage

    def step_loss(self, logprobs: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        return called(self.loss, logprobs, tokens)


@configurable
@dataclass(frozen=True)
class PSPG(_Proximal, SPG):
    """Proximal :class:`SPG`: on PPO's clipped ratios, so that a batch can be used for several
    steps.
    """


@configurable
@dataclass(frozen=True)
class POLA(_Proximal, LOLA):
    """Proximal :class:`LOLA`: PPO's clip replaces the penalties of Zhao et al. 2022, POLA."""


@configurable
@dataclass(frozen=True)
class PSOS(_Proximal, SOS):
    """Proximal :class:`SOS`: on PPO's clipped ratios, so that a batch can be used for several
    steps.
    """
