"""Converts torchrl's specs to the terms that networks are built from, with each tensor's key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.space import (
    ActionKind,
    Binary,
    Continuous,
    Discrete,
    MultiDiscrete,
    Observed,
    Space,
)
from lightning_rl.errors import ConfigError

Key = tuple[str, ...]

NOT_SEEN = ("info", "step_count", "is_init", "done", "terminated", "truncated", "reward")
"""Entries of an environment that are not observations of an agent."""
MASK = "mask"
"""A group's observation that tells which of its agents act."""


@dataclass(frozen=True)
class Places:
    """The keys of an agent's, or a group's, tensors in torchrl's TensorDicts.

    Args:
        observations: by name.
        actions: by name.
        logits: by action, if the environment reads the logits that it was sampled from.
        reward: key of a step's reward, under ``next``.
        shared_reward: True if all agents of the group share one reward.
    """

    observations: Mapping[str, Key]
    actions: Mapping[str, Key]
    logits: Mapping[str, Key]
    reward: Key
    shared_reward: bool

    def seen(self, data: TensorDict) -> dict[str, Tensor]:
        """Return the observations by name."""
        return {name: data.get(key) for name, key in self.observations.items()}

    def rewards(self, data: TensorDict, agents: int) -> Tensor:
        """Return the rewards (*B, *A) in ``data["next"]``."""
        reward = data.get(("next", *self.reward)).squeeze(-1).float()  # some pay whole numbers
        if self.shared_reward and agents:
            reward = reward.unsqueeze(-1).expand(*reward.shape, agents)
        return reward


def agents_of(env: Any) -> dict[str, tuple[Space, Places]]:
    """Return spaces and keys of each group of agents; a single agent is called ``agent``.

    Raises:
        ConfigError: for specs that no body or head supports.
    """
    groups = list(getattr(env, "group_map", {}) or {})
    return {name: _agent(env, name, (name,)) for name in groups} or {AGENT: _agent(env, AGENT, ())}


def _agent(env: Any, name: str, prefix: Key) -> tuple[Space, Places]:
    seen = _below(env.full_observation_spec_unbatched, prefix)
    seen = {key: spec for key, spec in seen.items() if not set(key) & set(NOT_SEEN)}
    acts = _below(env.full_action_spec_unbatched, prefix)
    if not seen or not acts:
        raise ConfigError(
            f"data.env: agent {name!r} has {'no action' if seen else 'no observation'} in the "
            "environment's specs; see env.action_spec and env.observation_spec"
        )
    rewards = _below(env.full_reward_spec_unbatched, prefix)
    own = next(iter(rewards), None)
    lead = 1 if prefix else 0
    first = next(iter(acts.values()))
    if prefix and not first.shape:
        raise ConfigError(f"data.env: actions of group {name!r} have no dimension for its agents")
    agents = int(first.shape[0]) if prefix else 0
    space = Space(
        {_name(key): _observed(spec, lead) for key, spec in seen.items()},
        {_name(key): _action(_name(key), spec, lead) for key, spec in acts.items()},
        agents,
        MASK if (MASK,) in seen else None,
    )
    places = Places(
        {_name(key): prefix + key for key in seen},
        {_name(key): prefix + key for key in acts},
        _logits(env, name, prefix, space),
        ("reward",) if own is None else prefix + own,
        own is None,
    )
    return space, places


def _logits(env: Any, name: str, prefix: Key, space: Space) -> dict[str, Key]:
    """Return the keys of logits that the environment reads, ``<action>_logits``, by action.

    Raises:
        ConfigError: for logits of an action that is not one choice of several.
    """
    named = {f"{action}_logits": action for action in space.actions}
    state = _below(env.full_state_spec_unbatched, prefix)
    result = {named[_name(key)]: prefix + key for key in state if _name(key) in named}
    for action in result:
        kind = space.actions[action]
        if not isinstance(kind, Discrete):
            raise ConfigError(
                f"data.env: the environment reads logits of agent {name!r}'s action {action!r}, "
                f"which is {kind}, but only a choice of one of several has logits"
            )
    return result


def _below(spec: Any, prefix: Key) -> dict[Key, Any]:
    """Return the leaves of a composite spec under a prefix, without the prefix."""
    result = {}
    for key in spec.keys(True, True):
        path = key if isinstance(key, tuple) else (key,)
        if path[: len(prefix)] == prefix:
            result[path[len(prefix) :]] = spec[key]
    return result


def _name(key: Key) -> str:
    return ".".join(key)


def _observed(spec: Any, lead: int) -> Observed:
    kind = torch.uint8 if spec.dtype in (torch.uint8, torch.bool) else torch.float32
    return Observed(tuple(spec.shape[lead:]), kind)


def _action(name: str, spec: Any, lead: int) -> ActionKind:
    from torchrl.data import Binary as BinarySpec, Categorical, MultiCategorical, OneHot

    if isinstance(spec, OneHot):
        return Discrete(int(spec.space.n), one_hot=True)
    if isinstance(spec, MultiCategorical):
        sizes = spec.nvec if spec.nvec.ndim == 1 else spec.nvec[0]
        return MultiDiscrete(tuple(map(int, sizes)))
    if isinstance(spec, Categorical):
        return Discrete(int(spec.space.n))
    if isinstance(spec, BinarySpec):
        return Binary(int(spec.shape[-1]))
    space = getattr(spec, "space", None)
    if spec.dtype.is_floating_point and len(spec.shape) == lead + 1:
        unbounded = torch.full(spec.shape, torch.inf)
        low, high = getattr(space, "low", -unbounded), getattr(space, "high", unbounded)
        if lead:
            low, high = low[0], high[0]
        return Continuous(low.float().cpu(), high.float().cpu())
    raise ConfigError(
        f"data.env: action {name!r} is a {type(spec).__name__} of shape {tuple(spec.shape)}, which "
        "no head supports"
    )
