"""Updates of players that take each other into account: SPG, LOLA, SOS, and their proximal kin."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.algos.games import GamePoint, nystrom_solve
from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, Surrogate
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite


class GameUpdate(ABC):
    """Makes of a game's losses a direction for each player, to step against.

    Losses may be exact, or means over steps in an environment; :meth:`step_loss` is of a step.

    ``needs_order``: it is made for players of whom some lead others. ``zero_at_zero_advantage``:
    the loss of a step without advantage is 0.
    """

    needs_order: ClassVar[bool] = False
    zero_at_zero_advantage: bool = True

    @abstractmethod
    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        """A direction (D_i,) for each player; ``draw`` is for what is random in it."""

    def step_loss(self, logprobs: Tensor, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Loss (M,) and metrics of steps, of the log probability (M,) of all that was done in each.

        -A p / sg(p) has the policy gradient and all its derivatives (Foerster et al. 2018, DiCE);
        of -A log p only the first is right.
        """
        return _called(Surrogate(), logprobs, {**tokens, "old_logprobs": logprobs.detach()})


def _called(loss: PolicyLoss, logprobs: Tensor, tokens: Any) -> tuple[Tensor, Metrics]:
    return loss(logprobs, tokens)  # losses read tokens by name alone


@dataclass(frozen=True)
class Simultaneous(GameUpdate):
    """Each player's own gradient, as if the others stood still: nabla_i L_i."""

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return [game.gradient(i, i).detach() for i in range(len(game.players))]


@configurable
@dataclass(frozen=True)
class SPG(GameUpdate):
    """Stackelberg policy gradient: leaders reckon with their followers' best answers.

    A leader steps against nabla_g L_g - sum_f <(H_f + rho I)^-1 nabla_f L_g, d nabla_f L_f / d
    theta_g>, with H_f = nabla_f^2 L_f by Nystrom's approximation; the last followers step against
    their own gradients (Fiez et al. 2020; Hataya and Yamada 2023 for the inverse).

    Args:
        rank: of the approximation: columns of the Hessian, which are drawn anew each time.
        rho: damping of the Hessian.

    Raises:
        ConfigError: for a rank below 1, or ``rho`` that is not positive and finite.
    """

    rank: int = 5
    rho: float = 0.1
    needs_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_at_least(1, rank=self.rank)
        require_finite(rho=self.rho)
        if self.rho <= 0:
            raise ConfigError(f"rho={self.rho} must be > 0: it keeps the inverse finite; try 0.1")

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        def answer(follower: int, vector: Tensor) -> Tensor:
            """-(H_f + rho I)^-1 v."""
            order = torch.randperm(len(vector), generator=draw, device="cpu")
            columns = order[: self.rank].to(vector.device)

            def product(v: Tensor) -> Tensor:
                return game.mixed(follower, follower, follower, v)

            return -nystrom_solve(product, vector, columns, self.rho)

        return [
            game.gradient(i, i).detach() + game.shaping(i, answer) for i in range(len(game.players))
        ]


@configurable
@dataclass(frozen=True)
class LOLA(GameUpdate):
    """Learning with opponent-learning awareness: each reckons with a gradient step of the others.

    The gradient of L_g(theta_g, theta_f - eta_f nabla_f L_f), to the first order in eta:
    nabla_g L_g - sum_f eta_f (chi + h), with h = nabla_g <nabla_f L_f, nabla_f L_g> for where f
    will be, and chi = <nabla_f L_g, d nabla_f L_f / d theta_g> for what g changes in that (Foerster
    et al. 2018, LOLA; in this form Letcher et al. 2019, SOS).

    Args:
        rate: eta, the step that a player takes the others to make; None: their learning rates.

    Raises:
        ConfigError: unless ``rate`` is positive and finite.
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        require_finite(rate=self.rate)
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"rate={self.rate} must be > 0; Simultaneous looks at nobody's step")

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        return [a + s for a, s in zip(*self._parts(game), strict=True)]

    def _parts(self, game: GamePoint) -> tuple[list[Tensor], list[Tensor]]:
        """xi_0 = nabla_g L_g - sum_f eta_f h, and -sum_f eta_f chi, of each player."""
        players = range(len(game.players))
        rates = game.rates if self.rate is None else [self.rate] * len(players)
        ahead = [game.gradient(i, i).detach() + game.foresight(i, rates) for i in players]
        return ahead, [game.shaping(i, lambda f, v: -rates[f] * v) for i in players]


@configurable
@dataclass(frozen=True)
class SOS(LOLA):
    """Stable opponent shaping: LOLA, as far as that neither turns around nor moves fixed points.

    xi_0 - p eta chi with p = min(p_1, p_2) of :func:`sos_weight`: near a fixed point, and where
    shaping would work against xi_0, there is less of it (Letcher et al. 2019, algorithm 1).

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

    def __call__(self, game: GamePoint, draw: torch.Generator) -> list[Tensor]:
        ahead, shaping = self._parts(game)
        own = Simultaneous()(game, draw)
        weight = sos_weight(torch.cat(own), torch.cat(ahead), torch.cat(shaping), self.a, self.b)
        return [a + weight * s for a, s in zip(ahead, shaping, strict=True)]


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
        return _called(self.loss, logprobs, tokens)


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
