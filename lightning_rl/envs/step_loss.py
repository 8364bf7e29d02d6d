"""StepLoss: the complete loss of an agent's step; JointLoss: one of several agents' choices."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics, divergence
from lightning_rl.config.arguments import configurable
from lightning_rl.config.hints import import_object, parameters
from lightning_rl.envs.maker import built_loss, require_installed
from lightning_rl.envs.networks.actor_critic import joint_entropy, joint_log_prob
from lightning_rl.envs.networks.distributions import ActionDistribution, Categorical
from lightning_rl.envs.rows import Rows
from lightning_rl.errors import ConfigError

Made = Mapping[str, ActionDistribution]
"""An agent's distributions, by action."""


class StepLoss(ABC):
    """A loss that replaces policy loss, critic's loss and entropy bonus at once."""

    @abstractmethod
    def __call__(self, made: Made, values: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        """Return the loss of each step, (M,), and metrics (M,), named ``policy/...`` and
        ``value/...``.

        Args:
            made: action distributions of M steps, with gradient.
            values: the critic's values, (*B), M of them, with gradient.
            rows: the steps.
        """


class JointLoss(ABC):
    """A loss of several agents' distributions, added to each agent's own loss.

    ``agents`` names them. They act in the same steps, and learn in the same iterations.
    """

    agents: Sequence[str]

    @abstractmethod
    def __call__(self, made: Mapping[str, Made]) -> tuple[Tensor, Metrics]:
        """Return the loss of each step, (*B,), and metrics (*B,); ``made``: by agent and action."""


@configurable
class TorchRLLoss(StepLoss):
    """A torchrl loss of an actor and a critic, such as ``torchrl.objectives.ClipPPOLoss``.

    It gets the module's agents as its networks, and ``advantage`` and ``value_target`` from the
    module's ``advantage``. Its critic loss and entropy bonus, if any, replace ``value_loss`` and
    ``entropy``. Its per-step results are averaged like any loss, so the module sets ``reduction``.

    Args:
        make: the import path of a class that takes ``actor_network`` and ``critic_network``:
            ``ClipPPOLoss``, ``PPOLoss`` or ``A2CLoss``.
        arguments: passed to it, such as ``clip_epsilon``, ``entropy_coeff`` and ``critic_coeff``.

    Raises:
        ConfigError: if there is no such class, it refuses an argument, or it needs more than steps.
    """

    def __init__(self, make: str, arguments: dict[str, Any] | None = None) -> None:
        require_installed("torchrl", "TorchRLLoss")
        self.make = make
        self.arguments = arguments or {}
        self._actor, self._critic = _Actor(), _Critic()
        _check(make)
        networks = {"actor_network": self._actor, "critic_network": self._critic}
        self._loss: nn.Module = built_loss(make, networks | _OWN, self.arguments)
        self._try()

    def __call__(self, made: Made, values: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        tokens: Any = {key: value.flatten() for key, value in rows.learned.items()}
        log_prob = joint_log_prob(made, rows.actions).flatten()
        entropy = joint_entropy(made).flatten()
        self._actor.now = _Distribution(log_prob, entropy)
        self._critic.now = values.flatten()
        data = TensorDict(
            {
                "action": torch.zeros_like(tokens["old_logprobs"]),  # what it is, the actor knows
                "action_log_prob": tokens["old_logprobs"],
                "advantage": tokens["advantages"].unsqueeze(-1),
                "value_target": tokens["returns"].unsqueeze(-1),
                "state_value": tokens["values"].unsqueeze(-1),
            },
            [len(log_prob)],
        )
        found = self._loss.to(log_prob.device)(data)
        del self._actor.now, self._critic.now  # with the gradients that they would keep
        parts = {
            name.removeprefix("loss_"): value.reshape(len(log_prob))
            for name, value in found.items()
            if name.startswith("loss_")
        }
        loss = torch.stack(list(parts.values())).sum(0)
        moved = divergence(log_prob, tokens)
        metrics = {"policy/loss": loss.detach(), "policy/entropy": entropy.detach()}
        metrics |= {f"policy/{name}": value for name, value in moved.items()}
        metrics |= {f"policy/{name}_loss": value.detach() for name, value in parts.items()}
        return loss, metrics

    def _try(self) -> None:
        """Refuse a loss that needs more than steps have."""
        logits = torch.zeros(2, 2, requires_grad=True, device="cpu")
        one = torch.zeros(2, device="cpu")
        names = ("old_logprobs", "advantages", "values", "returns", "weights")
        rows = Rows({}, {"action": one.long()}, dict.fromkeys(names, one))
        try:
            loss, _ = self({"action": Categorical(logits)}, one.clone().requires_grad_(), rows)
            loss.sum().backward()
        except Exception as error:  # whatever a class of others raises
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"{_refusal(self.make)} ({what})") from error


_OWN = {"reduction": "none", "functional": False}


def _check(make: str) -> None:
    """Refuse a class that is not an actor-critic loss.

    Raises:
        ConfigError: names it.
    """
    try:
        kind: Any = import_object(make)
    except ConfigError as error:
        raise ConfigError(f"model.loss.make: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"model.loss.make: {make} is not a loss; name one of torchrl.objectives")
    if not {"actor_network", "critic_network", *_OWN} <= set(parameters(import_object(make))):
        raise ConfigError(_refusal(make))


def _refusal(make: str) -> str:
    return (
        f"model.loss.make: {make} does not work on single steps of an actor and a critic; use "
        "ClipPPOLoss, PPOLoss or A2CLoss, or write your own loop for others"
    )


class _Actor(nn.Module):
    """The agent in the form of a torchrl actor, which returns its distribution."""

    now: "_Distribution"
    """The distribution of the actions in all present steps."""

    in_keys, out_keys = ("observation",), ("action",)
    dist_sample_keys, log_prob_keys = ("action",), ("action_log_prob",)

    def get_dist(self, tensordict: Any) -> "_Distribution":
        """Return the distribution of the actions in all steps."""
        return self.now


class _Critic(nn.Module):
    """The agent in the form of a torchrl critic."""

    now: Tensor
    """The values of the present steps, (M,)."""
    in_keys, out_keys = ("observation",), ("state_value",)

    def forward(self, tensordict: Any) -> Any:
        """Add the values of all steps."""
        return tensordict.set("state_value", self.now.unsqueeze(-1))


class _Distribution(torch.distributions.Distribution):
    """The distribution of the actions taken; only their log probs and entropies are available."""

    arg_constraints, has_rsample = {}, False

    def __init__(self, log_prob: Tensor, entropy: Tensor) -> None:
        super().__init__(log_prob.shape, validate_args=False)
        self._log_prob, self._entropy = log_prob, entropy

    def log_prob(self, value: Tensor) -> Tensor:
        return self._log_prob

    def entropy(self) -> Tensor:
        return self._entropy
