"""Batches of steps as Lightning gets them: laid out as torchrl's are, so that its parts take them.

A batch is a TensorDict [E, T], environments and steps, with what an agent saw by name, its action
by name, ``action_log_prob`` (E, T, *A), and under ``next`` what it saw then, ``reward`` (E, T, *A,
1) and, for all agents together, ``done``, ``terminated`` and ``truncated`` (E, T, 1). Where there
are several agents, or groups of them, an agent's part is under its name, also in ``next``. With a
memory there are ``recurrent_state`` and ``is_init``.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError

_TAKEN = {
    "next", "reward", "done", "terminated", "truncated", "action_log_prob", "recurrent_state",
    "is_init", "skipped",
}  # fmt: skip
"""What a batch has besides observations and actions."""


class EpisodeSource(Protocol):
    """What has played: an agent that knows what it sees and does."""

    @property
    def space(self) -> Space | None: ...


def handed_out(collected: TensorDict, spaces: Mapping[str, Space]) -> TensorDict:
    """The batch that a collector's ``steps`` and ``ends`` are; see :class:`EnvCollector`.

    Tensors are shared with it, but for what follows each step.
    """
    steps, ends = collected["steps"], collected["ends"]
    shape = steps.batch_size
    done, terminated = (steps[name].unsqueeze(-1) for name in ("done", "terminated"))
    none = torch.zeros_like(done)
    batch = {"done": none, "terminated": none.clone(), "truncated": none.clone()}
    if "skipped" in steps:
        batch["skipped"] = steps["skipped"]
    after = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    for name, space in spaces.items():
        own = steps[name]
        _require_free(name, space)
        part = {
            **own["observations"],
            **own["actions"],
            "action_log_prob": own["logprobs"],
        }
        if "state" in own:
            part |= {"recurrent_state": own["state"], "is_init": own["begins"].unsqueeze(-1)}
        then = {
            key: _following(seen, ends[name, "observations", key], ends["place"])
            for key, seen in own["observations"].items()
        }
        then["reward"] = own["rewards"].unsqueeze(-1)
        if _alone(spaces):
            batch, after = batch | part, after | then
        else:
            batch[name], after[name] = TensorDict(part, shape), TensorDict(then, shape)
    return TensorDict(batch | {"next": TensorDict(after, shape)}, shape)


def steps_of(batch: TensorDict, agents: Mapping[str, EpisodeSource]) -> TensorDict:
    """A batch's steps [E, T] as agents learn from them.

    ``done`` and ``terminated`` (E, T), and per agent, under its name, ``observations`` and
    ``following`` (what it saw before and after the step) by name, ``actions`` by name, ``logprobs``
    and ``rewards`` (E, T, *A); with a memory ``state`` (E, T, *A, S) before each step and
    ``begins`` (E, T); ``skipped`` (E, T) where ``min_episode_length`` asks for it. No tensor is
    copied.
    """
    after, shape = batch["next"], batch.batch_size
    steps = {name: after[name].squeeze(-1) for name in ("done", "terminated")}
    if "skipped" in batch:
        steps["skipped"] = batch["skipped"]
    for name, agent in agents.items():
        space = agent.space
        assert space is not None
        nested = isinstance(batch.get(name, None), TensorDict)
        own, then = (batch[name], after[name]) if nested else (batch, after)
        part = {
            "observations": {key: own[key] for key in space.observations},
            "following": {key: then[key] for key in space.observations},
            "actions": {key: own[key] for key in space.actions},
            "logprobs": own["action_log_prob"],
            "rewards": then["reward"].squeeze(-1),
        }
        if "recurrent_state" in own:
            part |= {"state": own["recurrent_state"], "begins": own["is_init"].squeeze(-1)}
        steps[name] = TensorDict(part, shape)
    return TensorDict(steps, shape)


def last_places(steps: TensorDict) -> Tensor:
    """Where no step follows, and yet the episode has not come to its end: e * T + t, (M,)."""
    done, terminated = steps["done"], steps["terminated"]
    last = done & ~terminated
    last[:, -1] = ~terminated[:, -1]
    return last.flatten().nonzero().squeeze(1)


def _alone(spaces: Mapping[str, Space]) -> bool:
    return list(spaces) == [AGENT]


def _require_free(name: str, space: Space) -> None:
    """Refuse names of an environment's that a batch needs for something else."""
    both = [*space.observations, *space.actions]
    taken = next((key for key in both if key in _TAKEN or both.count(key) > 1), None)
    if taken is not None:
        raise ConfigError(
            f"data.env: agent {name!r} has an observation or action {taken!r}, which is what a "
            "batch calls something else; rename it (gymnasium.wrappers.TransformObservation, "
            "torchrl.envs.RenameTransform)"
        )


def _following(seen: Tensor, last: Tensor, place: Tensor) -> Tensor:
    """What was seen after each step (E, T, ...): the next row, or what the batch has beside it."""
    after = torch.cat([seen[:, 1:], seen[:, -1:]], 1)
    after.view(-1, *after.shape[2:])[place] = last
    return after
