"""TorchRLCollector: torchrl's collector, with a seed and fresh episodes for each iteration."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.collector import (
    Agents,
    Deadline,
    EnvCollector,
    EnvEpisode,
    raised,
    require_finite_values,
    seeded,
)
from lightning_rl.envs.gym_player import close
from lightning_rl.envs.maker import TorchRLEnv, require_installed
from lightning_rl.envs.torchrl_envs import is_native, kill, side_by_side
from lightning_rl.envs.torchrl_policy import TorchRLPolicy, own_key
from lightning_rl.envs.torchrl_space import Places, agents_of
from lightning_rl.envs.watch import END_S, START_S
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.seeding import derived_seed

LONGEST = 100_000
"""Steps after which an evaluation episode without any limit is ended."""


class TorchRLCollector(EnvCollector):
    """Steps any torchrl environment, with torchrl's own ``Collector``.

    All environments are reset with the iteration's own seed at the start of a batch, so a
    checkpoint needs no simulator state. An episode is at most as long as a batch; the critic's
    value replaces later rewards.

    Args:
        env: the environment to step.
        max_episode_length: steps after which an episode is truncated; None: the environment's own
            limit.
        max_step_seconds: seconds after which a step is considered hanging.
    """

    deadline: Deadline

    def __init__(
        self, env: TorchRLEnv, max_episode_length: int | None, max_step_seconds: float
    ) -> None:
        require_at_least(1, max_episode_length=max_episode_length)
        self.env = env
        self._limit = max_episode_length
        self.deadline = Deadline(max_step_seconds, env.name)
        self._envs: Any = None
        self._seed = 0
        self._now = 0  # of what is being collected
        self._policy: TorchRLPolicy | None = None
        self._batches: Any = None
        self._collector: Any = None
        self._steps = 0
        self._open: list[Any] = []

    @property
    def exact(self) -> str:
        return "" if self.env.seeded else f"{self.env.name} is not deterministic given its seed"

    def start(self, seed: int, first: int, num_envs: int | None) -> None:
        require_installed("torchrl", "TorchRLEnv")
        import torchrl.collectors  # now, as that takes longer than a step may

        self._kind = torchrl.collectors.Collector
        self._seed = derived_seed(seed, first)
        one = self.env.made()
        found = agents_of(one)
        self._native = is_native(one)
        self.deadline.again(END_S)
        close(self.env.name, [one])
        self.deadline.again(START_S)
        self._envs = self._made(num_envs)
        self.agents = {name: space for name, (space, _) in found.items()}
        self._places: dict[str, Places] = {name: places for name, (_, places) in found.items()}

    def _made(self, count: int | None) -> Any:
        """Create ``count`` environments side by side."""
        self._open.append(side_by_side(self.env, count, self._limit))
        return self._open[-1]

    # ---------------------------------------------------------------- collecting

    def collect(self, agents: Agents, iteration: int, steps: int) -> TensorDict:
        if self._collector is None or steps != self._steps:
            with seeded(self._seed):  # it resets, when a resumed run's generators are restored
                self._begin(agents, steps)
        assert self._policy is not None
        self._policy.begin(self._envs.batch_size[0], self.greedy)
        seed = self._now = derived_seed(self._seed, iteration)
        try:
            with seeded(seed), torch.no_grad():
                self._envs.set_seed(seed % 2**31)
                data = next(self._batches)
        except BaseException as error:  # whatever an environment raises
            raise raised(self.env.name, self.where(), error) from error
        batch = self._batch(data)
        self.finished = self._finished(batch)
        return batch

    def _begin(self, agents: Agents, steps: int) -> None:
        from torchrl.envs.utils import ExplorationType

        self._steps = steps
        self._policy = TorchRLPolicy(agents, self.agents, self._places, self.deadline)
        self._collector = self._kind(
            self._envs,
            self._policy,
            frames_per_batch=steps * self._envs.batch_size[0],
            total_frames=-1,
            reset_at_each_iter=True,
            trust_policy=True,
            use_buffers=False,
            exploration_type=ExplorationType.RANDOM,
        )
        self._batches = iter(self._collector)

    def where(self) -> str:
        if self._policy is None:
            return ""
        return f"in step {self._policy.step} after a reset with seed {self._now % 2**31}"

    def _batch(self, data: Any) -> TensorDict:
        done, terminated = self._flags(data)
        count, steps = done.shape
        ends = done.clone()
        ends[:, -1] = True
        place = ends.flatten().nonzero().squeeze(1)
        own: dict[str, Any] = {}
        followed: dict[str, Any] = {}
        for name, places in self._places.items():
            space = self.agents[name]
            own[name] = {
                "observations": places.seen(data),
                "actions": data.get((*own_key(name), "actions")),
                "logprobs": data.get((*own_key(name), "logprobs")),
                "rewards": places.rewards(data, space.agents),
            }
            if (*own_key(name), "state") in data.keys(True):
                own[name]["state"] = data.get((*own_key(name), "state"))
                own[name]["begins"] = data.get("is_init").squeeze(-1)
            finite = own[name]["observations"] | {"reward": own[name]["rewards"]}
            require_finite_values(self.env.name, finite)
            after = places.seen(data.get("next"))
            followed[name] = {
                "observations": {n: value.flatten(0, 1)[place] for n, value in after.items()}
            }
        flags = {"done": done, "terminated": terminated}
        return TensorDict(
            {
                "steps": TensorDict(flags | own, [count, steps]),
                "ends": TensorDict({"place": place} | followed, [len(place)]),
            },
            [],
        )

    def _flags(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return ``done`` and ``terminated`` (E, T) of the environment, or of all of its agents."""
        after = data.get("next")
        if "done" in after:
            return after.get("done").squeeze(-1), after.get("terminated").squeeze(-1)
        groups = [after.get(name) for name in self._places]
        done, terminated = (
            torch.stack([g.get(key).flatten(2).all(-1) for g in groups]).all(0)
            for key in ("done", "terminated")
        )
        return done, terminated

    def _finished(self, batch: TensorDict) -> list[EnvEpisode]:
        done, terminated = batch["steps", "done"], batch["steps", "terminated"]
        earned = {n: _over_agents(batch["steps", n, "rewards"], 2) for n in self._places}
        episodes = []
        for env in range(len(done)):
            begin = 0
            for end in (done[env].nonzero().squeeze(1) + 1).tolist():
                rewards = {name: float(r[env, begin:end].sum()) for name, r in earned.items()}
                over = bool(terminated[env, end - 1])
                episodes.append(EnvEpisode(rewards, end - begin, terminated=over))
                begin = end
        return episodes

    # ---------------------------------------------------------------- episodes apart

    def play(
        self, agents: Agents, seeds: Sequence[int], greedy: bool, render: bool = False
    ) -> list[EnvEpisode]:
        envs = self._made(self._envs.batch_size[0] if self._native else len(seeds))
        policy = TorchRLPolicy(agents, self.agents, self._places, self.deadline)
        episodes: list[EnvEpisode] = []
        before, self._policy = self._policy, policy
        try:
            with torch.no_grad():
                while len(episodes) < len(seeds):
                    self._now = seeds[len(episodes)]
                    episodes += self._round(envs, policy, self._now, greedy, render)
        except BaseException as error:  # whatever an environment raises
            raise raised(self.env.name, self.where(), error) from error
        finally:
            self._policy = before
            self._close(envs)
        return episodes[: len(seeds)]

    def _round(
        self, envs: Any, policy: TorchRLPolicy, seed: int, greedy: bool, render: bool
    ) -> list[EnvEpisode]:
        """Play the first episode of each environment, with one seed."""
        count = envs.batch_size[0]
        policy.begin(count, greedy)
        pictures: list[list[Any]] = [[] for _ in range(count)]
        earned = {name: torch.zeros(count) for name in self._places}
        length = torch.zeros(count, dtype=torch.long)
        over, ended = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
        with seeded(seed):
            envs.set_seed(seed % 2**31)
            data = envs.reset()
            for _ in range(self._limit or LONGEST):
                if render:
                    self._picture(envs, data, pictures, ended)
                step, data = envs.step_and_maybe_reset(policy(data))
                live = (~ended).float()
                for name, places in self._places.items():
                    reward = places.rewards(step, self.agents[name].agents)
                    earned[name] += live * _over_agents(reward, 1)
                length += ~ended
                done, terminated = self._flags(step.unsqueeze(1))
                over |= ~ended & terminated[:, 0]
                ended |= done[:, 0]
                if bool(ended.all()):
                    break
        return [
            EnvEpisode(
                {name: float(rewards[i]) for name, rewards in earned.items()},
                int(length[i]),
                seed,
                bool(over[i]),
                pictures[i],
            )
            for i in range(count)
        ]

    def _picture(self, envs: Any, data: Any, pictures: list[list[Any]], ended: Tensor) -> None:
        if "pixels" not in data:
            raise ConfigError(
                f"data.env: {self.env.name} has no 'pixels' to show; add them (from_pixels: true "
                "for a GymEnv), or remove the preview"
            )
        for index, picture in enumerate(data.get("pixels")):
            if not ended[index]:
                pictures[index].append(picture.cpu().numpy())

    def close(self) -> None:
        if self._collector is not None:
            self._collector.shutdown(close_env=False)
            self._collector = self._batches = None
        if self._envs is not None:
            self._close(self._envs)
            self._envs = None

    def _close(self, envs: Any) -> None:
        if not envs.is_closed:
            close(self.env.name, [envs])
        self._open.remove(envs)

    def abandon(self) -> None:
        for envs in self._open:
            kill(envs)
        self._open, self._envs = [], None
        self._collector = self._batches = None


def _over_agents(rewards: Tensor, dims: int) -> Tensor:
    """Average over the dimensions after the first ``dims``, the agents' if there is one."""
    return rewards.flatten(dims).mean(-1) if rewards.ndim > dims else rewards
