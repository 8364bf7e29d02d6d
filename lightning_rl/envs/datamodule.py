"""EnvDataModule: environments behind Lightning's data interface."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from tensordict import TensorDict

from lightning_rl.collect.base import CollectingDataModule, Hanging
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.base import EnvModule
from lightning_rl.envs.batches import handed_out, too_short
from lightning_rl.envs.collector import EnvCollector, EnvEpisode
from lightning_rl.envs.collectors import collector_of
from lightning_rl.envs.loader import EnvLoader
from lightning_rl.envs.maker import EnvMaker
from lightning_rl.envs.networks.space import Space, require_same
from lightning_rl.envs.stats import episode_metrics, evaluation_metrics
from lightning_rl.envs.watch import Watch
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.run.files.resume import check_early, enter_directory, leave_directory
from lightning_rl.run.hooks import call_hook
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.cores import share_cores
from lightning_rl.run.seeding import derived_seed, run_seed

EVALUATION = 2**31
"""Index for seeds of evaluation episodes; larger than that of any environment."""


@configurable
class EnvDataModule(CollectingDataModule):
    """Steps environments with the module's agents, one batch of steps per iteration.

    Args:
        env: the environment.
        num_envs: number of copies stepped side by side, on all ranks together.
        frames_per_iteration: steps of all environments together in a batch.
        iterations_per_epoch: iterations that Lightning counts as one epoch.
        min_episode_length: shorter episodes are not trained on: their steps in the batch in which
            they end are masked, and counted in ``rollout/skipped_share``.
        max_episode_length: steps after which an episode is truncated; None: the environment's own
            limit.
        collector: the collector that steps them; None: the default for ``env``.
        greedy: collect with the best action (the mode of the agents' distributions) instead of
            sampling.
        eval_env: the environment to evaluate in; None: ``env``.
        eval_episodes: episodes of an evaluation, always with the same seeds; 0 disables evaluation.
        eval_greedy: take the best action in evaluations instead of sampling.
        judged_agent: the agent whose reward ``reward/mean`` and ``eval/reward_mean`` report if
            there are several; None: the mean over all.
        success_reward: an episode with at least this reward counts as a success; None: none does.
        max_step_seconds: seconds after which a step of the environments is considered hanging.
        threads: torch threads of this process on a CPU; more than one is slower for small networks.
            None leaves them unchanged.
        seed: seed of episodes and actions; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    collects = "step"

    def __init__(
        self,
        env: EnvMaker,
        num_envs: int = 8,
        frames_per_iteration: int = 1024,
        iterations_per_epoch: int = 100,
        min_episode_length: int = 1,
        max_episode_length: int | None = None,
        collector: EnvCollector | None = None,
        greedy: bool = False,
        eval_env: EnvMaker | None = None,
        eval_episodes: int = 10,
        eval_greedy: bool = True,
        judged_agent: str | None = None,
        success_reward: float | None = None,
        max_step_seconds: float = 60.0,
        threads: int | None = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(
            1,
            num_envs=num_envs,
            frames_per_iteration=frames_per_iteration,
            iterations_per_epoch=iterations_per_epoch,
            min_episode_length=min_episode_length,
            max_episode_length=max_episode_length,
            threads=threads,
        )
        if max_episode_length is not None and max_episode_length < min_episode_length:
            raise ConfigError(
                f"max_episode_length={max_episode_length} must be >= "
                f"min_episode_length={min_episode_length}, or every episode is skipped; raise it"
            )
        require_at_least(0, eval_episodes=eval_episodes)
        require_finite(success_reward=success_reward, max_step_seconds=max_step_seconds)
        if max_step_seconds <= 0:
            raise ConfigError(f"max_step_seconds={max_step_seconds} must be > 0")
        if frames_per_iteration % num_envs:
            raise ConfigError(
                f"frames_per_iteration={frames_per_iteration} must be a multiple of "
                f"num_envs={num_envs}, since each gives as many; "
                f"{frames_per_iteration - frames_per_iteration % num_envs or num_envs} would be"
            )
        self.env = env
        self.num_envs = num_envs
        self.frames_per_iteration = frames_per_iteration
        self.iterations_per_epoch = iterations_per_epoch
        self.min_episode_length = min_episode_length
        self.max_episode_length = max_episode_length
        self.eval_env = eval_env
        self.eval_episodes = eval_episodes
        self.eval_greedy = eval_greedy
        self.judged_agent = judged_agent
        self.success_reward = success_reward
        self.max_step_seconds = max_step_seconds
        self.threads = threads
        self.seed = run_seed(seed)
        self.collector = collector or collector_of(env, max_episode_length, max_step_seconds)
        self.collector.greedy = greedy
        self.calls = Watch(self.collector, env.name)
        """Runs the collector's calls, so that a hanging step does not hang the run."""
        self.player_calls = self.calls
        """Runs those of the collector that plays evaluation episodes."""
        if eval_env is not None:
            player = collector_of(eval_env, max_episode_length, max_step_seconds)
            self.player_calls = Watch(player, eval_env.name)
        self.episodes: Sequence[EnvEpisode] = ()
        """All ranks' episodes that ended in the last batch."""

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Observations and actions of each agent; known after ``setup``."""
        return self.collector.agents

    @property
    def steps(self) -> int:
        """Steps of each environment in a batch."""
        return self.frames_per_iteration // self.num_envs

    @property
    def evaluates(self) -> bool:
        """Return True if there are episodes to evaluate on."""
        return self.eval_episodes > 0

    nothing_to_evaluate = "set data.eval_episodes"

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Create the environments."""
        assert self.trainer is not None
        self._module()
        share_cores(self.trainer, self.threads)
        enter_directory(self.trainer)
        check_early(self.trainer)
        ranks = dist.world_size()
        if self.num_envs % ranks:
            raise ConfigError(
                f"num_envs={self.num_envs} must be a multiple of the {ranks} processes, since "
                "each steps equally many; change num_envs"
            )
        envs_per_rank = self.num_envs // ranks
        with dist.every_rank():
            self.calls.start(self.seed, dist.rank() * envs_per_rank, envs_per_rank)
            if self.player_calls is not self.calls:
                self.player_calls.start(self.seed, 0, None)
                require_same(self.collector.agents, self.player_calls.collector.agents)
        if self.judged_agent is not None and self.judged_agent not in self.spaces:
            raise ConfigError(
                f"judged_agent={self.judged_agent!r} does not exist; the environment has "
                f"{', '.join(self.spaces)}"
            )

    def new_loader(self) -> EnvLoader:
        module = self._module()
        return EnvLoader(
            self.collect,
            self.collector,
            self.iterations_per_epoch,
            self._epoch(),
            lambda: module.iteration,
        )

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        # What is there already need not be looked through, tensor by tensor.
        moves = isinstance(batch, TensorDict) and batch["done"].device != device
        return batch.to(device) if moves else batch

    def on_exception(self, exception: BaseException) -> None:
        """Close the environments, so that none outlives a run that failed or was interrupted."""
        self.close()

    def teardown(self, stage: str) -> None:
        self.close()
        if self.trainer is not None:
            leave_directory(self.trainer)

    def close(self) -> None:
        """Close all environments and their processes."""
        self.calls.close()
        if self.player_calls is not self.calls:
            self.player_calls.close()

    # ---------------------------------------------------------------- collecting

    def collect(self, iteration: int) -> TensorDict:
        """Return this rank's share of an iteration's steps, [E, T], see :mod:`.batches`."""
        module, trainer = self._module(), self.trainer
        assert trainer is not None
        call_hook(trainer, "on_collect_start")
        begin = time.perf_counter()
        with module.clock("generate"):
            batch = self.calls(
                lambda: self.collector.collect(module.agents, iteration, self.steps),
                trainer.precision_plugin.forward_context,
            )
        seconds = dist.all_reduce_max(time.perf_counter() - begin)
        finished = dist.gather(list(self.collector.finished))
        self.episodes = [episode for share in finished for episode in share]
        frames = self.frames_per_iteration
        module.record(episode_metrics(self.episodes, frames, seconds, self.judged_agent))
        if self.min_episode_length > 1:
            module.record({"rollout/skipped_share": self._skip_short(batch["steps"]) / frames})
        return handed_out(batch, self.spaces)

    def _skip_short(self, steps: TensorDict) -> float:
        """Mask the steps of short episodes; return their number on all ranks."""
        done = steps["done"]
        carried = self.collector.carried or [0] * len(done)
        steps["skipped"] = too_short(done, carried, self.min_episode_length)
        return float(dist.all_sum(steps["skipped"].sum().double()))

    def evaluate(self) -> tuple[list[EnvEpisode], dict[str, float]]:
        """Play separate episodes, always with the same seeds.

        Raises:
            ConfigError: if ``eval_episodes`` is 0.
        """
        if not self.evaluates:
            raise ConfigError(f"there is nothing to evaluate on; {self.nothing_to_evaluate}")
        if self.trainer is not None:
            call_hook(self.trainer, "on_evaluation_start")
        seeds = [derived_seed(self.seed, EVALUATION, i) % 2**31 for i in range(self.eval_episodes)]
        with dist.every_rank():
            shard = dist.shard(seeds)
            episodes = self._play(shard) if shard else []
        together = dist.interleaved(dist.gather(episodes))
        return together, evaluation_metrics(together, self.success_reward, self.judged_agent)

    def watch(self) -> EnvEpisode:
        """Play the first episode of an evaluation, with pictures; call it on one rank.

        Raises:
            ConfigError: if the environment renders none.
        """
        seed = derived_seed(self.seed, EVALUATION, 0) % 2**31
        [episode] = self._play([seed], render=True)
        return episode

    def _play(self, seeds: Sequence[int], render: bool = False) -> list[EnvEpisode]:
        """Play separate episodes, in the precision that the agents train in."""
        module, trainer, player = self._module(), self.trainer, self.player_calls.collector
        assert trainer is not None
        with module.clock("eval"):
            return self.player_calls(
                lambda: player.play(module.agents, seeds, self.eval_greedy, render),
                trainer.precision_plugin.forward_context,
            )

    def hanging(self) -> Hanging | None:
        """Return the environment step that is running right now, if any."""
        found = self.calls.hanging() or self.player_calls.hanging()
        return found and Hanging(*found, "If a step of an environment may take that long")

    def check(self, module: LightningModule) -> list[str] | None:
        """Create environments and agents, collect a batch, and report on them.

        Raises:
            ConfigError: if something does not fit.
            EnvError: if an environment fails.
        """
        if not isinstance(module, EnvModule):
            return None
        self.calls.start(self.seed, 0, self.num_envs)
        try:
            return self._checked(module)
        finally:
            self.close()
            self.collector.close()

    def _checked(self, module: EnvModule) -> list[str]:
        lines = [f"environment: {self.env.name}, {self.num_envs} copies side by side"]
        lines += [f"  {name}{space.described}" for name, space in self.spaces.items()]
        module.configure_model()
        count = sum(p.numel() for p in module.parameters())
        lines.append(f"agents: {module.described_as} ({count:,} parameters)")
        batch = self.calls(lambda: self.collector.collect(module.agents, 0, self.steps))
        size = sum(value.nbytes for value in batch.values(True, True))
        plan = f"an iteration: {self.steps} steps of each environment, {size / 2**20:.3g} MiB"
        lines.append("; ".join([plan, *module.planned(self.frames_per_iteration)]))
        if self.collector.exact:
            lines.append(f"a resumed run will not be bit-equal: {self.collector.exact}")
        return lines

    def _module(self) -> EnvModule:
        module = None if self.trainer is None else self.trainer.lightning_module
        if not isinstance(module, EnvModule):
            raise ConfigError(
                "EnvDataModule needs an ActorCriticModule or another EnvModule, not "
                f"{type(module).__name__}; for language models use RLDataModule"
            )
        return module
