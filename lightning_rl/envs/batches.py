"""Batches of steps as Lightning gets them: in torchrl's layout, so that its parts accept them.

A batch is a TensorDict [E, T], environments and steps, with an agent's observations by name, its
actions by name, ``action_log_prob`` (E, T, *A), and under ``next`` the observations after the
step, ``reward`` (E, T, *A, 1) and, for all agents together, ``done``, ``terminated`` and
``truncated`` (E, T, 1). With several agents or groups, an agent's part is under its name, also in
``next``. With a memory there are ``recurrent_state`` and ``is_init``.
"""

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError

_TAKEN = {
    "next", "reward", "done", "terminated", "truncated", "action_log_prob", "recurrent_state",
    "is_init", "skipped",
}  # fmt: skip
"""Keys of a batch besides observations and actions."""


def handed_out(collected: TensorDict, spaces: Mapping[str, Space]) -> TensorDict:
    """Convert a collector's ``steps`` and ``ends`` to a batch; see :class:`EnvCollector`.

    Tensors are shared with it, except the observations after each step.
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


def steps_of(batch: TensorDict, agents: Mapping[str, EnvAgent]) -> TensorDict:
    """Return a batch's steps [E, T] in the form that agents learn from.

    ``done`` and ``terminated`` (E, T), and per agent, under its name, ``observations`` and
    ``following`` (the observations before and after the step) by name, ``actions`` by name,
    ``logprobs`` and ``rewards`` (E, T, *A); with a memory also ``state`` (E, T, *A, S) before each
    step and ``begins`` (E, T); ``skipped`` (E, T) if ``min_episode_length`` requires it. No tensor
    is copied.
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


def too_short(done: Tensor, carried: Sequence[int], least: int) -> Tensor:
    """Mark steps (E, T) of episodes that ended in fewer than ``least`` steps.

    An episode that continues after the batch has not ended, so it is not too short.

    Args:
        done: (E, T), True if the episode ends with this step.
        carried: steps (E,) that the first episode of each environment had before the batch.
        least: minimum number of steps.
    """
    steps = torch.arange(done.shape[1])
    first = -torch.tensor(carried).unsqueeze(1)
    later = torch.where(done[:, :-1], steps[1:], first)
    begins = torch.cat([first, later], 1).cummax(1).values
    ends = torch.where(done, steps, done.shape[1]).flip(1).cummin(1).values.flip(1)
    return (ends < done.shape[1]) & (ends - begins + 1 < least)


def last_places(steps: TensorDict) -> Tensor:
    """Return the places e * T + t, (M,), of last steps whose episode has not terminated."""
    done, terminated = steps["done"], steps["terminated"]
    last = done & ~terminated
    last[:, -1] = ~terminated[:, -1]
    return last.flatten().nonzero().squeeze(1)


def _alone(spaces: Mapping[str, Space]) -> bool:
    return list(spaces) == [AGENT]


def _require_free(name: str, space: Space) -> None:
    """Refuse names of an environment's parts that a batch uses otherwise."""
    both = [*space.observations, *space.actions]
    taken = next((key for key in both if key in _TAKEN or both.count(key) > 1), None)
    if taken is not None:
        raise ConfigError(
            f"data.env: agent {name!r} has an observation or action {taken!r}, a name that a batch "
            "uses otherwise; rename it (gymnasium.wrappers.TransformObservation, "
            "torchrl.envs.RenameTransform)"
        )


def _following(seen: Tensor, last: Tensor, place: Tensor) -> Tensor:
    """Return the observation after each step (E, T, ...): the next row, or that in ``last``."""
    after = torch.cat([seen[:, 1:], seen[:, -1:]], 1)
    after.view(-1, *after.shape[2:])[place] = last
    return after
