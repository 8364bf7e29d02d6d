"""Agents that explore: a share of their actions is drawn uniformly."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.networks.distributions import (
    ActionDistribution,
    Categorical,
    TanhGaussian,
)
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.envs.networks.space import ActionKind, Space
from lightning_rl.errors import ConfigError


class ExploringAgent(EnvAgent):
    """An off-policy agent, of whose actions a share ``exploration`` is random.

    The module that trains it sets that share, in [0, 1], before each batch. It learns by a loss of
    torchrl's, for which ``loss`` has further arguments.
    """

    exploration: float = 0.0
    action: str
    """Name of its action, once it is built."""
    loss: Mapping[str, Any]

    @abstractmethod
    def torchrl_loss(self) -> tuple[str, dict[str, Any]]:
        """Return the import path of the loss that trains it, and our own arguments for it.

        Raises:
            ConfigError: if a network does not fit the environment.
        """

    @abstractmethod
    def measured(self, steps: TensorDict, found: TensorDict) -> dict[str, Tensor]:
        """Return metrics of some steps and what the loss found for them."""

    def seen(self, steps: TensorDict) -> dict[str, Tensor]:
        """Return the observations of some steps by name."""
        assert self.space is not None
        return {name: steps[name] for name in self.space.observations}

    def explored_at(self, iteration: int) -> float:
        """Return the share of random actions in an iteration after the warm-up."""
        return 0.0

    def separate_parts(self) -> list[list[nn.Parameter]]:
        return [list(self.parameters())]

    def further_parts(self, loss: Any) -> dict[str, list[nn.Parameter]]:
        """Return the parameters that only the loss has, by purpose, each to be clipped alone."""
        return {}


def single_action(space: Space, who: str) -> tuple[str, ActionKind]:
    """Return the single action of an environment, with its name.

    Raises:
        ConfigError: if there are several.
    """
    if len(space.actions) > 1:
        raise ConfigError(
            f"{who} takes one action, but the environment has {len(space.actions)} "
            f"({', '.join(space.actions)}); use ActorCritic"
        )
    return next(iter(space.actions.items()))


def require_no_memory(**bodies: object) -> None:
    """Refuse bodies with a memory for agents that learn from single steps.

    Raises:
        ConfigError: names the first one.
    """
    for name, body in bodies.items():
        if isinstance(body, RecurrentBody):
            raise ConfigError(
                f"{name}={type(body).__name__} has a memory, which single steps cannot train; "
                "use a body without memory, or ActorCritic with ActorCriticModule"
            )


@dataclass(frozen=True)
class EpsilonGreedy(Categorical):
    """The best of n actions by their values, or, with probability ``epsilon``, any of them.

    ``logits`` are the values (*B, n). An action with value -inf is not allowed, and never taken.
    """

    epsilon: float = 0.0

    @property
    def probs(self) -> Tensor:
        """epsilon / n, plus 1 - epsilon for the best (Sutton and Barto 2018, sec. 2.2)."""
        allowed = (self.logits > -torch.inf).to(self.logits.dtype)
        uniform = allowed / allowed.sum(-1, keepdim=True)
        best = torch.zeros_like(uniform).scatter(-1, self.logits.argmax(-1, keepdim=True), 1.0)
        return self.epsilon * uniform + (1 - self.epsilon) * best

    @property
    def logprobs(self) -> Tensor:
        return F.log_softmax(self.probs.log(), -1)

    def sample(self) -> Tensor:
        return Categorical(self.probs.log(), self.one_hot).sample()


@dataclass(frozen=True)
class PartlyUniform(ActionDistribution):
    """A :class:`TanhGaussian`, or, with probability ``share``, uniform within its bounds."""

    policy: TanhGaussian
    share: float = 0.0

    def sample(self) -> Tensor:
        drawn, low, high = self.policy.sample(), self.policy.low, self.policy.high
        anything = low + torch.rand_like(drawn) * (high - low)
        return torch.where(torch.rand_like(drawn[..., :1]) < self.share, anything, drawn)

    def mode(self) -> Tensor:
        return self.policy.mode()

    def log_prob(self, action: Tensor) -> Tensor:
        # log(s / volume + (1 - s) p(a)).
        log_volume = (self.policy.high - self.policy.low).log().sum(-1)
        share = self.policy.mean.new_tensor(self.share)
        own = (1 - share).log() + self.policy.log_prob(action)
        return torch.logaddexp(share.log() - log_volume, own)

    def entropy(self) -> Tensor:
        """Estimate the entropy from one sample."""
        return -self.log_prob(self.sample())

    def kl(self, new: "PartlyUniform") -> Tensor:
        """Estimate the KL from one sample."""
        action = self.sample()
        return self.log_prob(action) - new.log_prob(action)
