"""ActorCritic: one agent, or a group of similar agents, made of bodies and heads."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.agent import EnvAgent, Observations
from lightning_rl.envs.networks.bodies import Body, MLPBody
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.networks.layers import output
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.envs.networks.policy_heads import PolicyHead, default_head
from lightning_rl.envs.networks.space import Space, mask_of
from lightning_rl.errors import ConfigError


@configurable
class ActorCritic(EnvAgent):
    """An agent: a body and policy heads, and a body and head for its values.

    In a group of several agents (``PettingZooWrapper``, ``VmasEnv``) all share it; bodies such as
    ``PerAgent`` and ``Centralized`` change that.

    Args:
        body: computes the features for actions, and for values if shared.
        policy: a head for each action of the environment, by its name; or a single head if there is
            one action. None: the default heads for the environment's actions.
        share_body: compute values from the same features as actions.
        critic_body: computes the features for values; None: like ``body``, with its own weights.
        body_lr: factor on the optimizer's learning rate for ``body``.
        actor_lr: the same for the policy heads.
        critic_lr: the same for modules that only values use.
        options: ``schedule`` and ``pretrained``, see :class:`EnvAgent`.

    Raises:
        ConfigError: for values out of range, or a recurrent body that is not shared.
    """

    def __init__(
        self,
        body: Body | None = None,
        policy: PolicyHead | dict[str, PolicyHead] | None = None,
        share_body: bool = False,
        critic_body: Body | None = None,
        body_lr: float = 1.0,
        actor_lr: float = 1.0,
        critic_lr: float = 1.0,
        **options: Any,
    ) -> None:
        factors = {"body_lr": body_lr, "actor_lr": actor_lr, "critic_lr": critic_lr}
        super().__init__(factors=factors, **options)
        self.body = body if body is not None else MLPBody()
        if share_body and critic_body is not None:
            raise ConfigError(
                f"share_body=true with critic_body={type(critic_body).__name__}: values come from "
                "one of them; remove the other"
            )
        if any(isinstance(b, RecurrentBody) for b in (self.body, critic_body)) and not share_body:
            raise ConfigError(
                "a body with a memory must be shared by actor and critic; set share_body: true"
            )
        self._policy = (policy,)  # a tuple hides modules until they are built
        self.share_body = share_body
        self._critic_body = (critic_body,)

    def build(self, space: Space) -> None:
        self.space = space
        given = self._critic_body[0]
        critic = None if self.share_body else given or copy.deepcopy(self.body)
        features = self.body.build(space)
        self.heads = nn.ModuleDict(self._built_heads(space, features))
        self.critic_body = critic
        width = features if critic is None else critic.build(space)
        self.value_layer = output(width, 1)
        self.take_pretrained()

    def _built_heads(self, space: Space, features: int) -> dict[str, PolicyHead]:
        given = self._policy[0]
        if isinstance(given, PolicyHead):
            if len(space.actions) > 1:
                raise ConfigError(
                    f"policy={type(given).__name__}: the environment takes {len(space.actions)} "
                    f"actions ({', '.join(space.actions)}); give a mapping with a head for each"
                )
            given = {next(iter(space.actions)): given}
        heads = dict(given or {})
        unknown = [name for name in heads if name not in space.actions]
        if unknown:
            raise ConfigError(
                f"policy: the environment has no action {unknown[0]!r}; it has "
                f"{', '.join(space.actions)}"
            )
        for name, kind in space.actions.items():
            heads.setdefault(name, default_head(kind))
            heads[name].mask = mask_of(name)
            heads[name].build(features, kind)
        return {name: heads[name] for name in space.actions}

    def act(
        self, observations: Observations, state: Tensor | None = None
    ) -> tuple[dict[str, ActionDistribution], Tensor | None]:
        if state is None:
            features = self.body(observations)
        else:
            features, state = self.body.step(observations, state)  # type: ignore[operator]
        return {name: head(features, observations) for name, head in self.heads.items()}, state

    def forward(
        self, observations: Observations, state: Tensor | None = None, begins: Tensor | None = None
    ) -> tuple[dict[str, ActionDistribution], Tensor]:
        """Return action distributions by name, and values (*B); a memory is unrolled over clips."""
        features = self._features(observations, state, begins)
        distributions = {name: head(features, observations) for name, head in self.heads.items()}
        return distributions, self._values_of(features, observations)

    def values(
        self, observations: Observations, state: Tensor | None = None, begins: Tensor | None = None
    ) -> Tensor:
        """Return only the values (*B)."""
        if self.critic_body is not None:
            return self._values_of(None, observations)
        return self._values_of(self._features(observations, state, begins), observations)

    def _features(
        self, observations: Observations, state: Tensor | None, begins: Tensor | None
    ) -> Tensor:
        if state is None:
            features: Tensor = self.body(observations)
            return features
        assert isinstance(self.body, RecurrentBody) and begins is not None
        return self.body.unroll(observations, state, begins)

    def _values_of(self, features: Tensor | None, observations: Observations) -> Tensor:
        if self.critic_body is not None:
            features = self.critic_body(observations)
        values: Tensor = self.value_layer(features).squeeze(-1)
        return values

    def separate_parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters of actor and critic, separately unless they share a body."""
        body, actor, critic = self.parts().values()
        return [body + actor + critic] if self.critic_body is None else [body + actor, critic]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        critic = list(self.value_layer.parameters())
        if self.critic_body is not None:
            critic += self.critic_body.parameters()
        return {
            "body": list(self.body.parameters()),
            "actor": list(self.heads.parameters()),
            "critic": critic,
        }


def sampled(distributions: Mapping[str, ActionDistribution], greedy: bool) -> dict[str, Tensor]:
    """Return an action of each distribution: its mode if ``greedy``, else a sample."""
    return {n: d.mode() if greedy else d.sample() for n, d in distributions.items()}


def joint_log_prob(
    distributions: Mapping[str, ActionDistribution], actions: Mapping[str, Tensor]
) -> Tensor:
    """Return the joint log probability of all actions of a step, (*B,)."""
    parts = [d.log_prob(actions[name]) for name, d in distributions.items()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def joint_entropy(distributions: Mapping[str, ActionDistribution]) -> Tensor:
    """Return the joint entropy of all actions of a step, (*B,)."""
    parts = [d.entropy() for d in distributions.values()]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
