"""Heads compute action distributions, or values, from a body's features."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.distributions import (
    ActionDistribution,
    Bernoulli,
    Categorical,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
)
from lightning_rl.envs.networks.layers import output
from lightning_rl.envs.networks.space import (
    ActionKind,
    Binary,
    Continuous,
    Discrete,
    MultiDiscrete,
    allowed_only,
)
from lightning_rl.errors import ConfigError, require_finite

SMALL = 0.01
"""Gain of a policy's last layer, so that it starts near uniform (Andrychowicz et al. 2021)."""


class PolicyHead(nn.Module, ABC):
    """Computes the distribution of one action; built, like a body, once the environment is known.

    ``mask``: name of the observation that tells which choices of the action are allowed, if any.
    """

    mask = "action_mask"

    @abstractmethod
    def build(self, features: int, action: ActionKind) -> None:
        """Create the layers.

        Raises:
            ConfigError: if it does not support such actions.
        """

    @abstractmethod
    def forward(self, features: Tensor, observations: Mapping[str, Tensor]) -> ActionDistribution:
        """Return the distribution, for features (*B, F)."""


def default_head(action: ActionKind) -> PolicyHead:
    """Return the default head for a kind of action."""
    if isinstance(action, Discrete | MultiDiscrete):
        return CategoricalHead()
    return BernoulliHead() if isinstance(action, Binary) else GaussianHead()


def _refuse(head: PolicyHead, action: ActionKind) -> ConfigError:
    return ConfigError(
        f"{type(head).__name__} does not support {type(action).__name__} actions, which the "
        f"environment takes; use {type(default_head(action)).__name__}, or remove policy"
    )


class CategoricalHead(PolicyHead):
    """One of n choices, or one of each of several; an observation ``<action>_mask`` may forbid
    some.
    """

    def build(self, features: int, action: ActionKind) -> None:
        if not isinstance(action, Discrete | MultiDiscrete):
            raise _refuse(self, action)
        self.action = action
        width = action.n if isinstance(action, Discrete) else sum(action.ns)
        self.layer = output(features, width, SMALL)

    def forward(
        self, features: Tensor, observations: Mapping[str, Tensor]
    ) -> Categorical | MultiCategorical:
        logits = allowed_only(self.layer(features), observations.get(self.mask))
        if isinstance(self.action, Discrete):
            return Categorical(logits, self.action.one_hot)
        return MultiCategorical(logits, self.action.ns)


class BernoulliHead(PolicyHead):
    """Switches, each on or off."""

    def build(self, features: int, action: ActionKind) -> None:
        if not isinstance(action, Binary):
            raise _refuse(self, action)
        self.layer = output(features, action.n, SMALL)

    def forward(self, features: Tensor, observations: Mapping[str, Tensor]) -> Bernoulli:
        return Bernoulli(self.layer(features))


@configurable
class GaussianHead(PolicyHead):
    """Independent normals whose spread does not depend on the observation.

    The environment clips actions beyond its bounds, not the head, so that their density is known.

    Args:
        log_std: initial log standard deviation.

    Raises:
        ConfigError: if it is not finite.
    """

    def __init__(self, log_std: float = 0.0) -> None:
        super().__init__()
        require_finite(log_std=log_std)
        self.begin = log_std

    def build(self, features: int, action: ActionKind) -> None:
        if not isinstance(action, Continuous):
            raise _refuse(self, action)
        self.layer = output(features, action.size, SMALL)
        self.log_std = nn.Parameter(torch.full((action.size,), self.begin))

    def forward(self, features: Tensor, observations: Mapping[str, Tensor]) -> Gaussian:
        return Gaussian(self.layer(features), self.log_std)


@configurable
class TanhGaussianHead(PolicyHead):
    """Normals squashed into the bounds, with a spread per observation; SAC's policy.

    Args:
        low: minimum log standard deviation.
        high: maximum log standard deviation.

    Raises:
        ConfigError: unless ``low < high``; when built, for actions without bounds.
    """

    def __init__(self, low: float = -5.0, high: float = 2.0) -> None:
        super().__init__()
        require_finite(low=low, high=high)
        if not low < high:
            raise ConfigError(f"TanhGaussianHead(low={low}, high={high}): low must be below high")
        self.least, self.most = low, high

    def build(self, features: int, action: ActionKind) -> None:
        if not isinstance(action, Continuous):
            raise _refuse(self, action)
        if not bool((action.low.isfinite() & action.high.isfinite()).all()):
            raise ConfigError(
                "TanhGaussianHead squashes actions into bounds, but this environment's have none; "
                "use GaussianHead"
            )
        self.layer = output(features, 2 * action.size, SMALL)
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", action.low.clone(), persistent=False)
        self.register_buffer("high", action.high.clone(), persistent=False)

    def forward(self, features: Tensor, observations: Mapping[str, Tensor]) -> TanhGaussian:
        mean, spread = self.layer(features).chunk(2, -1)
        log_std = self.least + 0.5 * (self.most - self.least) * (spread.tanh() + 1)
        return TanhGaussian(mean, log_std, self.low, self.high)
