"""Mixtures of experts: the loss that balances their load, and the replay of routers' choices."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.models.routing import RouterOutputs
from lightning_rl.run.processes.dist import all_sum


@configurable
@dataclass(frozen=True)
class LoadBalance:
    """The load-balancing loss of routers (Fedus et al. 2021, Switch Transformer, eq. 4-6).

    E sum_e f_e P_e: f_e is the share of tokens that expert e gets, P_e its mean probability,
    both over all layers, as transformers computes it. It equals K, the number of experts per token,
    for an even load. It covers all tokens of a micro-batch, prompts that rollouts share counting
    once; a micro-batch is weighted as its tokens are in the loss.

    Args:
        coef: weight of the loss; None takes the model's ``router_aux_loss_coef``.

    Raises:
        ConfigError: if ``coef`` is negative or not finite.
    """

    coef: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, **{"balance.coef": self.coef})
        require_finite(**{"balance.coef": self.coef})

    def __call__(self, router_outputs: RouterOutputs) -> Tensor:
        """Return the loss, shape (), without the coefficient."""
        return balance_loss(router_outputs)

    def of_model(self, config: object, model: str) -> "LoadBalance":
        """Return it with the coefficient of the model's configuration, unless ``coef`` is set.

        Raises:
            ConfigError: if neither has a coefficient.
        """
        if self.coef is not None:
            return self
        coef = getattr(config, "router_aux_loss_coef", None)
        if coef is None:
            raise ConfigError(
                f"model={model!r} has no router_aux_loss_coef; set balance.coef, e.g. 0.001"
            )
        return LoadBalance(float(coef))


def balance_loss(router_outputs: RouterOutputs) -> Tensor:
    """Sum over the E experts of E f_e P_e, both means over layers; shape ()."""
    return (
        router_outputs.probs.shape[1]
        * (router_outputs.load.mean(0) * router_outputs.probs.mean(0)).sum()
    )


class RoutingReplay(ABC):
    """Decides whose choice of experts the trainer's passes over a batch repeat.

    A small rounding difference routes tokens to other experts, and their logprobs jump. When the
    choice of another pass is replayed, the gate weights are still the trainer's own, and have a
    gradient.
    """

    from_engine: ClassVar[bool]
    """True if the engine's choice is replayed; the engine is then told to record it."""

    @abstractmethod
    def begin(self, batch: TensorDict) -> None:
        """Prepare for the first pass over a batch."""

    @abstractmethod
    def is_of(self, name: str) -> bool:
        """Return True if the routing of the pass that computes ``name`` is recorded for replay."""


class RolloutRouting(RoutingReplay):
    """Replay the engine's choice in all passes of the policy (R3, Ma et al. 2025, 2510.11370).

    It covers prompts and tokens that an environment gave. A reference's routers choose themselves.
    """

    from_engine = True

    def begin(self, batch: TensorDict) -> None:
        if "routed_experts" not in batch["tokens"]:
            raise ConfigError(
                "routing_replay=RolloutRouting: no rollout of this batch recorded its experts; let "
                "the engine record them (TransformersEngine(routed_experts=True)), or use "
                "OldRouting"
            )

    def is_of(self, name: str) -> bool:
        return False


class OldRouting(RoutingReplay):
    """Replay the choice of the pass that computes ``old_logprobs`` in its updates (R2).

    With a single update per batch there is no such pass, so nothing is replayed.
    """

    from_engine = False

    def begin(self, batch: TensorDict) -> None:
        if "routed_experts" in batch["tokens"]:
            del batch["tokens", "routed_experts"]

    def is_of(self, name: str) -> bool:
        return name == "old_logprobs"


class ExpertLoad:
    """Metrics of the experts over the passes of an update, across all ranks."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: tuple[Tensor, Tensor] | None = None
        """Sums over tokens: load (L, E); router entropy and replayed choices that differ (2,)."""

    def add(self, router_outputs: RouterOutputs, counts: bool = True) -> None:
        """Add a pass; one with ``counts`` False only contributes the shape of the metrics."""
        tokens = len(router_outputs.experts) * counts
        load = router_outputs.load.double() * tokens
        others = (
            torch.stack([router_outputs.entropy.mean(), router_outputs.otherwise]).double() * tokens
        )
        if self._sums is not None:
            load, others = load + self._sums[0], others + self._sums[1]
        self._sums = load, others
        self._tokens += tokens

    def compute(self) -> dict[str, float]:
        """Return the metrics and reset; empty if no pass counted."""
        if self._sums is None:
            return {}
        load, others = self._sums
        total = all_sum(torch.cat([load.flatten(), others, load.new_tensor([self._tokens])]))
        self._tokens, self._sums = 0, None
        load, (entropy, otherwise, tokens) = total[:-3].view_as(load), total[-3:]
        if not tokens:
            return {}
        shares = load / load.sum(1, keepdim=True)
        even = -torch.xlogy(shares, shares).sum(1) / math.log(load.shape[1])
        return {
            "experts/busiest_share": float(load.max() / tokens),
            "experts/idlest_share": float(load.min() / tokens),
            "experts/overload": float(shares.max() * load.shape[1]),
            "experts/dead_share": float((load == 0).double().mean()),
            "experts/load_entropy": float(even.mean()),
            "experts/router_entropy": float(entropy / tokens),
            "experts/replayed_otherwise": float(otherwise / tokens),
        }
