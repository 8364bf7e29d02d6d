"""Rows: the steps of a batch that an agent learns from, sampled in minibatches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.algos.steps import StepAdvantage, Steps
from lightning_rl.envs.batches import last_places, steps_of
from lightning_rl.envs.networks.actor_critic import ActorCritic
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.processes.dist import global_mean_std


@configurable
@dataclass(frozen=True)
class Clips:
    """Pieces of episodes to train a body with a memory on, each from its memory at the time.

    Args:
        length: steps per clip.
        stride: steps from the beginning of one clip to that of the next; None: ``length``, without
            overlap.
        num_samples: number of clips sampled from a batch in each epoch; None: all of them.

    Raises:
        ConfigError: for values below 1, or a ``length`` longer than a batch.
    """

    length: int = 16
    stride: int | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, length=self.length, stride=self.stride, num_samples=self.num_samples)

    def places(self, environments: int, steps: int) -> Tensor:
        """Return where clips begin, as e * T + t, (N,)."""
        if self.length > steps:
            raise ConfigError(
                f"Clips(length={self.length}): a batch has {steps} steps of each environment; "
                "raise frames_per_iteration, or lower length"
            )
        begins = torch.arange(0, steps - self.length + 1, self.stride or self.length)
        return (torch.arange(environments).unsqueeze(1) * steps + begins).flatten()


@dataclass(frozen=True)
class Rows:
    """Steps of one agent, row by row: (N, *A, ...) each, or clips of L of them, (L, N, *A, ...)."""

    observations: Mapping[str, Tensor]
    actions: Mapping[str, Tensor]
    learned: Mapping[str, Tensor]
    """``old_logprobs``, ``advantages``, ``values``, ``returns`` and ``weights``, as losses take."""
    state: Tensor | None = None
    begins: Tensor | None = None
    partial: bool = False
    """True if some of them have zero weight."""

    def teaching(self, places: Tensor) -> Tensor:
        """Return the places whose steps have weight, if single steps are learned from."""
        if not self.partial or self.state is not None:
            return places
        weights = self.learned["weights"]
        return places[
            weights.flatten(1).any(1)[places] if weights.ndim > 1 else weights[places] > 0
        ]

    def at(self, places: Tensor) -> "Rows":
        """Return these rows, (M, *A, ...)."""
        return Rows(
            {name: value[places] for name, value in self.observations.items()},
            {name: value[places] for name, value in self.actions.items()},
            {name: value[places] for name, value in self.learned.items()},
        )

    def clips(self, places: Tensor, length: int) -> "Rows":
        """Return clips of ``length`` steps that begin there, (L, M, *A, ...)."""
        assert self.state is not None and self.begins is not None
        steps = places + torch.arange(length, device=places.device).unsqueeze(1)
        clips = self.at(steps)
        return replace(clips, state=self.state[places], begins=self.begins[steps])


@torch.no_grad()
def rows_of(
    agent: ActorCritic,
    name: str,
    batch: TensorDict,
    advantage: StepAdvantage,
    idle: bool = False,
) -> tuple[Rows, dict[str, float]]:
    """Return all that an agent learns from a batch, and metrics of the critic.

    Steps in which an agent does not act get advantages only if ``idle``: for what others did.

    Raises:
        ConfigError: if the batch lacks something.
    """
    steps = steps_of(batch, {name: agent})
    own = steps[name]
    rewards, done, terminated = own["rewards"], steps["done"], steps["terminated"]
    if advantage.needs_values:
        values, following = _values(agent, own, last_places(steps))
    else:
        values = following = torch.zeros_like(rewards)
    advantages, returns = advantage(Steps(rewards, values, following, terminated, done))
    weights = torch.ones_like(rewards)
    mask = None if agent.space is None or agent.space.mask is None else agent.space.mask
    if mask is not None:
        weights = own["observations", mask].reshape(rewards.shape).to(rewards.dtype)
    if "skipped" in steps:
        learns = ~steps["skipped"].reshape(*done.shape, *[1] * (rewards.ndim - 2))
        weights = weights * learns
    live = torch.ones_like(weights, dtype=torch.bool) if idle else weights > 0
    measured = {}
    if advantage.needs_values and bool(live.any()):
        spread = returns[live].var(unbiased=False).clamp(min=1e-8)
        error = (returns - values)[live].var(unbiased=False)
        measured = {"value/explained_variance": float(1 - error / spread)}
    if advantage.normalize:
        advantages = normalized(advantages, live)
    learned = {
        "old_logprobs": own["logprobs"],
        "advantages": advantages,
        "values": values,
        "returns": returns,
        "weights": weights,
    }
    rows = Rows(
        _flat(own["observations"]),
        _flat(own["actions"]),
        {key: value.flatten(0, 1) for key, value in learned.items()},
        own["state"].flatten(0, 1) if "state" in own else None,
        own["begins"].flatten() if "begins" in own else None,
        partial=not bool(live.all()),
    )
    return rows, measured


def normalized(advantages: Tensor, live: Tensor) -> Tensor:
    """Normalise to mean 0 and (biased) standard deviation 1 over all ranks' ``live``; 0 elsewhere.

    All ranks must call it together.
    """
    mean, std = global_mean_std(advantages[live])
    return ((advantages - mean) / (std + 1e-8)).where(live, 0.0)  # none may be live


def _flat(tensors: TensorDict) -> dict[str, Tensor]:
    return {name: value.flatten(0, 1) for name, value in tensors.items()}


def _values(agent: ActorCritic, own: TensorDict, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (E, T, *A) of the observations before and after each step."""
    seen = dict(own["observations"].items())
    last = {n: after.flatten(0, 1)[place] for n, after in own["following"].items()}
    if isinstance(agent.body, RecurrentBody):
        in_time = {n: value.transpose(0, 1) for n, value in seen.items()}
        values = agent.values(in_time, own["state"][:, 0], own["begins"].T).transpose(0, 1)
        before = {n: value.flatten(0, 1)[place] for n, value in seen.items()}
        _, state = agent.body.step(before, own["state"].flatten(0, 1)[place])
        fresh = torch.zeros(1, len(place), dtype=torch.bool, device=place.device)
        ahead = {n: value.unsqueeze(0) for n, value in last.items()}
        final = agent.values(ahead, state, fresh)[0]
    else:
        values = agent.values(seen)
        final = agent.values(last) if len(place) else values.new_zeros(0, *values.shape[2:])
    following = torch.zeros_like(values)
    following[:, :-1] = values[:, 1:]
    flat = following.flatten(0, 1)
    flat[place] = final
    return values, flat.reshape(following.shape)


def minibatches(
    rows: Rows, count: int, clips: Clips | None, shape: tuple[int, int], generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield shuffled places of rows, or of clips, in ``count`` parts of nearly equal size."""
    device = rows.learned["advantages"].device
    if clips is None:
        order = torch.randperm(shape[0] * shape[1], generator=generator)
    else:
        places = clips.places(*shape)
        drawn = torch.randperm(len(places), generator=generator)[: clips.num_samples]
        order = places[drawn]
    yield from order.to(device).tensor_split(count)
