"""RLDataModule: prompts, engine and rewards behind Lightning's data interface."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.collect.base import CollectingDataModule, Hanging
from lightning_rl.collect.checks import (
    check_experts,
    check_policies,
    check_rollouts,
    check_streaming,
    room_for_prompts,
)
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import Collector, GroupFilter, SyncCollector
from lightning_rl.collect.evaluation import Evaluation
from lightning_rl.collect.lengths import follow_requests
from lightning_rl.collect.loader import LazyLoader, RolloutLoader, limited_epoch
from lightning_rl.collect.mixture import naming
from lightning_rl.collect.peek import Peek
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.stats import set_metrics
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.collect.tasks import Task, by_name, grader_of, tasks_of
from lightning_rl.config.arguments import configurable
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.data.curriculum import RepeatedPrompts
from lightning_rl.data.prompts import Prompts
from lightning_rl.data.sources import AnyPrompts, expert_rollouts, prompts_of
from lightning_rl.engines import default_engine
from lightning_rl.engines.base import Engine, RunState, drives_engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.fitting import check_learning, check_sight, follow_trainer
from lightning_rl.learn.overlap import NoOverlap
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.streamed import Stream
from lightning_rl.models.tokenizer import with_chat_variables
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import require_free
from lightning_rl.rewards.log import TrainerState
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.files.resume import check_early, enter_directory, leave_directory
from lightning_rl.run.files.rundir import output_path
from lightning_rl.run.hooks import call_hook
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.cores import share_cores, switching_often
from lightning_rl.run.processes.dist import announced
from lightning_rl.run.seeding import run_seed
from lightning_rl.sync.schedule import SyncState

STOP_SECONDS = 10.0
"""Maximum seconds for which a failed run waits until requests in flight have stopped."""


@configurable(train_prompts=prompts_of, eval_prompts=prompts_of, expert_prompts=prompts_of)
class RLDataModule(CollectingDataModule):
    """Collects graded rollouts, one batch of groups per iteration.

    Args:
        train_prompts: prompts to train on; a :class:`Mixture` for several sets, each with its own
            agent, rewards and sampling. Also the path of a file; in Python also a list of prompts
            or rows, or a table (the same holds for the other prompts).
        rewards: functions ``f(prompts, completions, **columns) -> list[float]``, plain or async; in
            Python also a single one, or import paths. None: every set of a mixture has its own.
        engine: generates; None: vLLM in process, or transformers if vLLM is not installed.
        eval_prompts: held-out prompts, for ``Evaluate``, ``validate`` and ``test``; a
            :class:`Mixture` for several sets, each evaluated as a whole.
        expert_prompts: rows with a ``completion`` to imitate in addition to the rollouts; see
            ``SFTMix``.
        expert_per_iteration: number of expert rows per iteration.
        buffer: keeps the groups of a run, and mixes older ones into each batch; None: no buffer.
        filters: groups rejected by any of them are replaced by groups of new prompts.
        max_rounds: at most this many times ``groups_per_iteration`` groups are generated for one
            batch, after which the run stops.
        refill_seconds: no replacement begins later than this many seconds after the batch; None: no
            limit.
        train_on_rest: when nothing more may be generated, fill the batch with the groups that
            filters rejected last, instead of stopping the run. Replacements still being generated
            after ``refill_seconds`` are evicted.
        agent: generates one rollout.
        collector: decides when each group is generated for training; None: the whole batch at once,
            by ``SyncCollector``, which is always used to collect without training.
        sampling: sampling settings for training.
        eval_sampling: sampling settings for evaluation; None: ``sampling``. Greedy:
            ``temperature: 0``.
        group_size: rollouts per prompt (G).
        groups_per_iteration: prompts per iteration.
        iterations_per_epoch: iterations that Lightning counts as one epoch.
        eval_samples: rollouts per held-out prompt; from 2 on, pass@k is reported too, and maj@k
            where a reward gives answers.
        eval_limit: evaluate only this many prompts, the first of each set; None: all.
        success_reward: a held-out rollout with at least this reward counts as correct.
        eval_metrics: functions ``f(rollouts) -> dict[str, float]`` of all held-out rollouts, whose
            numbers are recorded as ``eval/<name>`` in addition to accuracy.
        reward_weights: one per reward; None: all 1.
        max_failed_share: maximum share of an iteration's rollouts whose grading may fail; beyond it
            the run stops.
        chat_template_kwargs: further variables of the chat template, such as ``enable_thinking``,
            for all prompts and for the agent.
        seed: the seed from which every request's own seed is derived; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    nothing_to_evaluate = "set data.eval_prompts"

    def __init__(
        self,
        train_prompts: AnyPrompts,
        rewards: list[Callable[..., list[float]]] | None = None,
        engine: Engine | None = None,
        eval_prompts: AnyPrompts | None = None,
        expert_prompts: AnyPrompts | None = None,
        expert_per_iteration: int = 0,
        buffer: ReplayBuffer | None = None,
        filters: list[GroupFilter] | None = None,
        max_rounds: int = 40,
        refill_seconds: float | None = None,
        train_on_rest: bool = False,
        agent: Agent = SingleTurn(),
        collector: Collector | None = None,
        sampling: Sampling = Sampling(),
        eval_sampling: Sampling | None = None,
        group_size: int = 8,
        groups_per_iteration: int = 32,
        iterations_per_epoch: int = 100,
        eval_samples: int = 1,
        eval_limit: int | None = None,
        success_reward: float = 1.0,
        eval_metrics: list[Callable[..., dict[str, float]]] | None = None,
        reward_weights: list[float] | None = None,
        max_failed_share: float = 0.1,
        chat_template_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(
            1,
            group_size=group_size,
            groups_per_iteration=groups_per_iteration,
            iterations_per_epoch=iterations_per_epoch,
            eval_samples=eval_samples,
            eval_limit=eval_limit,
            max_rounds=max_rounds,
        )
        check_rollouts(groups_per_iteration, group_size)
        require_finite(success_reward=success_reward, refill_seconds=refill_seconds)
        require_at_least(0, refill_seconds=refill_seconds)
        self.train_prompts = train_prompts
        self.eval_prompts = eval_prompts
        self.engine = engine if engine is not None else default_engine()
        self.expert_prompts = expert_prompts
        self.expert_per_iteration = expert_per_iteration
        self.buffer = buffer
        self.filters = filters or []
        self.max_rounds = max_rounds
        self.refill_seconds = refill_seconds
        self.train_on_rest = train_on_rest
        self.agent = agent
        self.collector = collector if collector is not None else SyncCollector()
        self.sampling = sampling
        self.eval_sampling = eval_sampling or sampling
        self.group_size = group_size
        self.groups_per_iteration = groups_per_iteration
        self.iterations_per_epoch = iterations_per_epoch
        self.eval_samples = eval_samples
        self.eval_limit = eval_limit
        self.success_reward = success_reward
        self.eval_metrics = eval_metrics or []
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.seed = run_seed(seed)
        self._common_rewards = (
            None if rewards is None else Rewards(rewards, reward_weights, max_failed_share)
        )
        self.train_tasks = tasks_of(
            train_prompts, agent, self._common_rewards, sampling, group_size, success_reward
        )
        """One task per set of training prompts, or a single one."""
        held_out = (
            []
            if eval_prompts is None
            else tasks_of(
                eval_prompts,
                agent,
                self._common_rewards,
                self.eval_sampling,
                eval_samples,
                success_reward,
            )
        )
        self.evaluation = Evaluation(held_out, self.train_tasks, self.seed, self.eval_metrics)
        """Creates the groups of held-out prompts, and computes their metrics."""
        self.rewards = grader_of(self.train_tasks)
        """Grades the training rollouts."""
        if reward_weights is not None and rewards is None:
            raise ConfigError(
                f"reward_weights={reward_weights} apply to rewards, which is null; set rewards, or "
                "set the weights in the prompt sets that have rewards"
            )
        self._model_dir: tempfile.TemporaryDirectory[str] | None = None
        self._collection: Collection | None = None
        self._during_fit = ExitStack()
        self._began: float | None = None  # when the last iteration did
        self._loader: RolloutLoader | None = None
        self._loader_state: dict[str, Any] | None = None
        self.first_iteration = 0  # of those collected without training
        self.predict_series: LazyLoader | None = None  # in place of these
        self.generated: list[Rollout] = []
        """All ranks' rollouts of the last iteration; without logprobs if there are several ranks.
        """

    @property
    def _tasks(self) -> list[Task]:
        """The tasks of training and of evaluation."""
        return [*self.train_tasks, *self.evaluation.tasks]

    def task_of(self, prompt: Prompt) -> Task:
        """Return the task of a training prompt.

        Raises:
            ConfigError: if there is no such prompt set.
        """
        tasks = {task.name: task for task in self.train_tasks}
        if prompt.set not in tasks:
            raise ConfigError(
                f"data.train_prompts has no prompt set {prompt.set!r}; its sets are "
                f"{', '.join(tasks)}"
            )
        return tasks[prompt.set]

    @property
    def all_agents(self) -> list[Agent]:
        """The data module's own agent and those of all tasks, without duplicates."""
        agents = (self.agent, *(task.agent for task in self._tasks))
        return list({id(agent): agent for agent in agents}.values())

    @property
    def all_rewards(self) -> list[Rewards]:
        """The rewards of all tasks, without duplicates."""
        return list(dict.fromkeys(task.rewards for task in self._tasks))

    def hanging(self) -> Hanging | None:
        found = next((call for rewards in self.all_rewards if (call := rewards.hanging())), None)
        if found is None:
            return None
        advice = "Isolated gives a reward a time limit; if it may take that long"
        return Hanging(f"reward {found[0]}", found[1], advice)

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load the prompts and start the engine, after Lightning has created its process group."""
        self._module()  # is there one, and a Trainer?
        assert self.trainer is not None
        share_cores(self.trainer)
        enter_directory(self.trainer)
        if self.buffer is not None:
            name = Path(self.buffer.path).name
            self.buffer.use_file(output_path(self.trainer, self.buffer.path, name))
        self.load_prompts(stage)
        check_early(self.trainer)
        module = self._module()
        with dist.every_rank():
            room = self._start_engine(module)
        room = dist.from_rank_zero(room)
        for task in self._tasks:
            with naming(task.name):
                task.prompts.bound(room_for_prompts(room, task.sampling))
        works = stage == "fit" and drives_engine(self.engine)
        if works and self.collector.works_between_batches:
            self._during_fit.enter_context(switching_often())
        self._collection = Collection(
            self._made_pipeline(self.train_tasks),
            self.collector if works else SyncCollector(),
            self._source(stage),
            self.filters,
            self.max_rounds,
            self.refill_seconds,
            self.train_on_rest,
            self.buffer if stage == "fit" else None,
            None if self.expert_prompts is None else self._experts,
        )
        if works and dist.world_size() == 1:  # ranks that wait may not agree on a push
            self._collection.meanwhile = self._while_waiting

    def _made_pipeline(self, tasks: Sequence[Task]) -> RolloutPipeline:
        return RolloutPipeline(
            self.engine,
            self.agent,
            grader_of(tasks),
            self._tokenizer,
            self._module().clock,
            by_name(tasks),
        )

    def _start_engine(self, module: RolloutModule) -> int:
        """Start the engine if this rank drives it; return its maximum length in tokens, else 0."""
        if not drives_engine(self.engine):
            return 0
        if not self.engine.running:
            self._model_dir = tempfile.TemporaryDirectory(prefix="lightning_rl_")
            module.save_skeletons(self._model_dir.name)
            trusted = (policy.loading.trust_remote_code for policy in module.policies.values())
            self.engine.trust_remote_code = any(trusted)
            follow_requests(self.engine, self._tasks, Path(self._model_dir.name))
            with announced(self.engine.starting):
                self.engine.start(Path(self._model_dir.name))
        return self.engine.max_length

    def _source(self, stage: str) -> GroupSource:
        # Where one engine serves all ranks, rank 0 issues all groups.
        alone = self.engine.serves_all_ranks
        rank, ranks = (0, 1) if alone else (dist.rank(), dist.world_size())
        count = self.groups_per_iteration
        prompts: Prompts = self.train_prompts
        if stage == "fit" and self.trainer.overfit_batches:  # type: ignore[union-attr]
            prompts = RepeatedPrompts(prompts, self._epoch() * count)
        return GroupSource(
            prompts,
            count // ranks,
            self.group_size,
            self.sampling,
            self.seed,
            rank=rank,
            ranks=ranks,
            tasks=by_name(self.train_tasks),
            baseline=stage == "fit"
            and any(policy.advantage.needs_baseline for policy in self._module().policies.values()),
        )

    def load_prompts(self, stage: str) -> None:
        """Check the settings and load the prompts: the part of ``setup`` that needs no engine."""
        module = self._module()
        self.engine.serve(module.roles)
        check_policies(
            len(module.policies),
            streams=isinstance(self.collector, StreamedCollector),
            buffer=self.buffer is not None,
            experts=self.expert_prompts is not None,
        )
        if stage == "fit":
            for policy in module.policies.values():
                self._check_learning(policy)
        if self.expert_prompts is not None:
            for policy in module.policies.values():
                check_experts(policy.advantage, policy.objective)
        module.day.date = dist.from_rank_zero(module.day.date)
        self._tokenizer = tokenizer = self.load_tokenizer(module)
        check_sight(self.engine, tokenizer)
        with dist.every_rank():
            if dist.rank() == 0:  # it reads the weights once
                module.require_sound_models()
        assert self.trainer is not None
        follow_trainer(self.engine, module, compute_dtype(self.trainer))
        for agent in self.all_agents:
            agent.configure(tokenizer)
        for prompts in (self.train_prompts, self.expert_prompts, self.eval_prompts):
            if prompts is not None:
                prompts.load(tokenizer, self.agent.chat_options)
                if prompts is not self.expert_prompts:
                    require_free(prompts.row_columns(), repr(prompts))
        # Where the configuration tells the engine's length, do not start it only to refuse.
        limit = getattr(self.engine, "max_model_len", None)
        if limit is not None:
            for task in self._tasks:
                with naming(task.name):
                    room_for_prompts(limit, task.sampling)

    def _check_learning(self, policy: PolicyModule) -> None:
        check_learning(
            policy.advantage,
            policy.objective,
            policy.settings,
            self.train_tasks,
            self.collector,
            self.filters,
            self.buffer,
            self.groups_per_iteration,
        )
        if isinstance(self.collector, StreamedCollector):
            check_streaming(
                policy.advantage,
                policy.aggregation,
                buffer=self.buffer is not None,
                experts=self.expert_prompts is not None,
                of_batch=self.rewards.of_batch,
                filtered_minibatches=bool(self.filters) and policy.settings.minibatches > 1,
                sharded=policy.device_mesh is not None,
                sleeps=self.engine.sleep_level is not None,
                shared=self.engine.serves_all_ranks and dist.world_size() > 1,
                measures=policy.packs is not None,
            )

    def load_tokenizer(self, module: RolloutModule) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the module's model, with the ``chat_template_kwargs``."""
        return with_chat_variables(module.load_tokenizer(), self.chat_template_kwargs, module.day)

    def on_exception(self, exception: BaseException) -> None:
        """Stop all background work when a run fails or is interrupted."""
        self._during_fit.close()
        if self._collection is None:
            return
        try:
            self._collection.close(timeout=STOP_SECONDS)
        except TimeoutError:
            rank_zero_warn(
                "rollouts in flight could not be stopped, because a reward or agent blocks"
            )

    def teardown(self, stage: str) -> None:
        self._during_fit.close()
        if self._collection is not None:
            self._collection.close()
        for agent in self.all_agents:
            agent.close()
        self.engine.close()
        for rewards in self.all_rewards:
            rewards.close()
        if self.buffer is not None:
            self.buffer.close()
        if self._model_dir is not None:
            self._model_dir.cleanup()
            self._model_dir = None
        if self.trainer is not None:
            leave_directory(self.trainer)

    def train_dataloader(self) -> RolloutLoader:
        module = self._module()
        learners = [policy.learner for policy in module.policies.values()]
        for learner in learners:
            learner.overlap = NoOverlap()
        if isinstance(self.collector, StreamedCollector):
            [learner] = learners  # of several that is refused
            learner.overlap = self._ready().stream = Stream(learner)
        self._loader = RolloutLoader(
            self.collect,
            self._ready(),
            self.iterations_per_epoch,
            lambda: module.iteration,
            self._epoch(),
            list(module.roles),
        )
        if self._loader_state is not None:
            self._loader.load_state_dict(self._loader_state)
            self._loader_state = None
        epochs = None if self.trainer is None else self.trainer.max_epochs
        if epochs is not None and epochs > 0:
            last = self._loader.first + epochs * self._epoch()
            self._ready().source.iterations = last
        return self._loader

    # Lightning restores a loader's own state only if the checkpoint was taken within an epoch.
    def state_dict(self) -> dict[str, Any]:
        return _states(loader=self._loader, buffer=self.buffer, experts=self.expert_prompts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader_state = state_dict["loader"]
        _load_states(state_dict, buffer=self.buffer, experts=self.expert_prompts)

    def predict_dataloader(self) -> Any:
        """Return a loader of batches of graded rollouts, for ``lightning-rl rollout``."""
        return self.predict_series or LazyLoader(
            lambda place: self.collect(self.first_iteration + place), self.iterations_per_epoch
        )

    def rollout_state(self) -> dict[str, Any]:
        """Return the state of collecting without training, as primitives."""
        return _states(batches=self._ready(), experts=self.expert_prompts)

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken, from ``first_iteration`` on."""
        _load_states(state, batches=self._ready(), experts=self.expert_prompts)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, TensorDict) else batch

    # ---------------------------------------------------------------- collecting

    def collect(self, iteration: int) -> list[Rollout]:
        """Generate and grade one iteration's rollouts, and notify the callbacks."""
        module, trainer = self._module(), self.trainer
        assert trainer is not None
        call_hook(trainer, "on_collect_start")
        before, self._began = self._began, time.monotonic()
        for rewards in self.all_rewards:
            if before is not None:
                rewards.end_iteration(self._began - before)
            rewards.state = self._reward_state(iteration)
        collection = self._ready()
        rollouts = collection.next(iteration, module.iteration, self._collected)
        if collection.buffer is not None:
            module.record(collection.buffer.metrics)
        return rollouts

    def _while_waiting(self) -> None:
        assert self.trainer is not None
        call_hook(self.trainer, "on_collect_wait")

    def _collected(self, rollouts: list[Rollout]) -> None:
        """Record the rollouts collected on all ranks, and pass them to prompts and callbacks."""
        module, prompts, trainer = self._module(), self.train_prompts, self.trainer
        assert trainer is not None
        groups, metrics = self._ready().of_all_ranks(module.iteration, module.role_versions)
        counted = [[rollout for rollout in group if not rollout.baseline] for group in groups]
        self._ready().observe(prompts, counted)
        module.record(metrics | set_metrics(counted, prompts.shares()))
        if prompts.dropped:
            module.record({"data/prompts_dropped": float(prompts.dropped)})
        self.generated = [rollout for group in groups for rollout in group]
        call_hook(trainer, "on_collect_end", rollouts)

    def _experts(self, iteration: int) -> list[Rollout]:
        """Return this rank's share of an iteration's expert rows."""
        assert self.expert_prompts is not None
        count = self.expert_per_iteration
        return expert_rollouts(self.expert_prompts, count, iteration, self._tokenizer)

    def _reward_state(self, iteration: int) -> TrainerState:
        total, length = self._ready().source.iterations or -1, self.iterations_per_epoch
        return TrainerState(
            global_step=iteration,
            max_steps=total,
            epoch=iteration / length,
            num_train_epochs=-1 if total < 0 else -(-total // length),
            is_world_process_zero=dist.rank() == 0,
        )

    def sync_state(self, trainer_version: int, policy: str = "") -> SyncState:
        """Return the state by which a sync schedule decides; may be called at any time.

        ``policy`` is the name of the policy whose version is asked for, if there are several.
        """
        return SyncState(
            trainer_version,
            self.engine.of_policy(policy).version,
            run_async(self.collector.status()),
            self._run_state(),
            tuple(self.engine.replica_states()),
        )

    def _run_state(self) -> RunState:
        if self.trainer is None or self.trainer.state.status != TrainerStatus.RUNNING:
            return RunState.STOPPED
        waits = self._module().clock.stage in ("generate", "reward", "sync")
        return RunState.WAITING if waits else RunState.RUNNING

    def before_sync(self) -> None:
        """Let the collector prepare for a change of the engine's weights."""
        with self._module().clock("generate"):
            run_async(self._ready().collector.before_sync())

    def after_sync(self) -> None:
        """Let the collector continue with the new weights."""
        run_async(self._ready().collector.after_sync())

    @property
    def evaluates(self) -> bool:
        return self.eval_prompts is not None

    def evaluate(self) -> tuple[list[Rollout], dict[str, float]]:
        """Generate and grade rollouts of the held-out prompts, always with the same seeds.

        Raises:
            ConfigError: without ``eval_prompts``, or if one of ``eval_metrics`` fails.
        """
        if self.eval_prompts is None:
            raise ConfigError(f"there is nothing to evaluate on; {self.nothing_to_evaluate}")
        clock = self._module().clock
        groups = self.evaluation.groups(self.eval_limit)
        with clock("eval"), self._ready().yielding():
            pipeline = self._made_pipeline(self.evaluation.tasks)
            rollouts = pipeline.complete_together(groups, self.eval_sampling)
        return rollouts, self.evaluation.all_metrics(rollouts)

    def scores(self, done: list[Rollout]) -> dict[str, dict[str, float]]:
        return self.evaluation.scores(done)

    def try_out(self, groups: int, group_size: int) -> list[Rollout]:
        """Return graded rollouts of the first prompts, without using up any prompts of the
        training.

        Raises:
            EngineError: if the engine is not ready, or fails.
            RewardError: if too large a share of the rollouts could not be graded.
        """
        prompts = self.train_prompts.first(groups)
        return self._ready().pipeline.run(prompts, group_size, self.sampling, self.seed)

    def peek(self, module: RolloutModule, groups: int = 2, group_size: int | None = None) -> Peek:
        """Return a small batch for inspection, e.g. in a notebook: collected, graded and packed.

        It uses the first prompts and the module's current policy. The engine is started and stopped
        for it; later runs are unaffected.

        Args:
            module: the module whose policy generates; trained or not.
            groups: number of prompts.
            group_size: rollouts per prompt; None: as in training.

        Raises:
            ConfigError: if either is in a run, or if the two are incompatible.
            EngineError: if the engine does not start, or fails.
            RewardError: if too large a share of the rollouts could not be graded.
        """
        require_at_least(1, groups=groups, group_size=group_size)
        # By name: callbacks know the data module, not the other way round.
        look = import_module("lightning_rl.callbacks.peek").peek
        found: Peek = look(self, module, groups, group_size or self.group_size)
        return found

    def _epoch(self) -> int:
        """Return the number of iterations in an epoch, within the Trainer's limits."""
        length = self.iterations_per_epoch
        return length if self.trainer is None else limited_epoch(self.trainer, length)

    def _ready(self) -> Collection:
        assert self._collection is not None, "setup() comes first"
        return self._collection

    def _module(self) -> RolloutModule:
        if self.trainer is None:
            raise ConfigError(
                "RLDataModule collects with the policy of a run, but has no Trainer yet; call "
                "datamodule.peek(module) to inspect a batch, or pass both to trainer.fit"
            )
        module = self.trainer.lightning_module
        if not isinstance(module, RolloutModule):
            raise ConfigError(
                f"RLDataModule works with a PolicyModule or RolesModule, not "
                f"{type(module).__name__}; for supervised training use SFTDataModule"
            )
        return module


def _states(**parts: Any) -> dict[str, Any]:
    """Return the state of each part; None for a part that is None."""
    return {name: None if part is None else part.state_dict() for name, part in parts.items()}


def _load_states(states: dict[str, Any], **parts: Any) -> None:
    for name, part in parts.items():
        if part is not None and states.get(name) is not None:
            part.load_state_dict(states[name])
