"""Updates of players that take each other into account: SPG, LOLA, SOS, and their proximal kin."""

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
    """Each player's own gradient, as if the others stood still: nabla_i L_i."""

    factors: ClassVar[int | None] = 1

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return own_gradients(game)


@configurable
@dataclass(frozen=True)
class _Bounded(GameUpdate):
    """A player's own gradient, and a term for the others' sake that is no longer than allowed."""

    bound: float | None = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        require_finite(bound=self.bound)
        if self.bound is not None and self.bound <= 0:
            raise ConfigError(
                f"bound={self.bound} must be > 0: how many times as long as a player's own "
                "gradient what is added to it may be; null for no bound"
            )

    @abstractmethod
    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        """What each player's direction has beyond its own gradient, (D_i,), before the bound."""

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
    """Stackelberg policy gradient: leaders reckon with their followers' best answers.

    A leader steps against nabla_g L_g - sum_f <(H_f + rho I)^-1 nabla_f L_g, d nabla_f L_f / d
    theta_g>, with H_f = nabla_f^2 L_f by Nystrom's approximation; the last followers step against
    their own gradients (Fiez et al. 2020; Hataya and Yamada 2023 for the inverse).

    Args:
        rank: of the approximation: columns of the Hessian, which are drawn anew each time.
        rho: damping of the Hessian.
        bound: how many times as long as a player's own gradient what is added to it may be; None:
            any length. It is for estimates: of losses that are known exactly nothing is cut.

    Raises:
        ConfigError: for a rank below 1, or ``rho`` or ``bound`` not positive and finite.
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
            """The same in all parts of the episodes."""
            return torch.randperm(size, generator=draw, device="cpu")[: self.rank]

        def answer(point: GamePoint, follower: int, vector: Tensor) -> Tensor:
            """-(H_f + rho I)^-1 v."""
            chosen = columns(follower, len(vector)).to(vector.device)

            def product(v: Tensor) -> Tensor:
                return point.mixed(follower, follower, follower, v)

            return -nystrom_solve(product, vector, chosen, self.rho)

        return [game.shaping(i, answer) for i in range(len(game.players))]


@configurable
@dataclass(frozen=True)
class LOLA(_Bounded):
    """Learning with opponent-learning awareness: each reckons with a gradient step of the others.

    The gradient of L_g(theta_g, theta_f - eta_f nabla_f L_f), to the first order in eta:
    nabla_g L_g - sum_f eta_f (chi + h), with h = nabla_g <nabla_f L_f, nabla_f L_g> for where f
    will be, and chi = <nabla_f L_g, d nabla_f L_f / d theta_g> for what g changes in that (Foerster
    et al. 2018, LOLA; in this form Letcher et al. 2019, SOS).

    Args:
        rate: eta, the step that a player takes the others to make; None: their learning rates.
        bound: how many times as long as a player's own gradient what is added to it may be; None:
            any length. It is for estimates: of losses that are known exactly nothing is cut.

    Raises:
        ConfigError: unless ``rate`` and ``bound`` are positive and finite.
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite(rate=self.rate)
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"rate={self.rate} must be > 0; Simultaneous looks at nobody's step")

    def added(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return [h + chi for h, chi in zip(*self._terms(game), strict=True)]

    def _terms(self, game: GamePoint) -> tuple[list[Tensor], list[Tensor]]:
        """-sum_f eta_f h, and -sum_f eta_f chi, of each player."""
        players = range(len(game.players))
        rates = game.rates if self.rate is None else [self.rate] * len(players)
        ahead = [game.foresight(i, rates) for i in players]
        return ahead, [game.shaping(i, lambda _, f, v: -rates[f] * v) for i in players]


@configurable
@dataclass(frozen=True)
class SOS(LOLA):
    """Stable opponent shaping: LOLA, as far as that neither turns around nor moves fixed points.

    xi_0 - p eta chi with p = min(p_1, p_2) of :func:`sos_weight`, and xi_0 = nabla_g L_g - sum_f
    eta_f h: near a fixed point, and where shaping would work against xi_0, there is less of it
    (Letcher et al. 2019, algorithm 1).

    Args:
        a: how far shaping may work against xi_0, in (0, 1).
        b: length of the simultaneous gradient below which shaping fades, in (0, 1).

    Raises:
        ConfigError: for values out of range.
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
    """p = min(p_1, p_2), a scalar; of all players' vectors together, each (D,).

    With xi (``own``), xi_0 (``ahead``) and s = -eta chi (``shaping``): p_1 = 1 if <s, xi_0> >= 0,
    else min(1, -a |xi_0|^2 / <s, xi_0>), so that the update keeps xi_0's side; p_2 = |xi|^2 if
    |xi| < b, else 1, so that fixed points of xi stay (Letcher et al. 2019, algorithm 1).
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
    """A game update on ratios to the policies that collected, within bounds.

    So it may go over a batch several times. Where losses are exact there is nothing to bound, and
    it is the update that it is a variant of.

    Args:
        loss: of the ratio of all that was done in a step.
    """

    loss: PolicyLoss = PPOClip()

    @property
    def zero_at_zero_advantage(self) -> bool:  # type: ignore[override]
        """As ``loss`` has it."""
        return self.loss.zero_at_zero_advantage

    def step_loss(self, logprobs: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        return called(self.loss, logprobs, tokens)


@configurable
@dataclass(frozen=True)
class PSPG(_Proximal, SPG):
    """Proximal :class:`SPG`: on PPO's clipped ratios, so that a batch serves several steps."""


@configurable
@dataclass(frozen=True)
class POLA(_Proximal, LOLA):
    """Proximal :class:`LOLA`: PPO's clip stands for the penalties of Zhao et al. 2022, POLA."""


@configurable
@dataclass(frozen=True)
class PSOS(_Proximal, SOS):
    """Proximal :class:`SOS`: on PPO's clipped ratios, so that a batch serves several steps."""
