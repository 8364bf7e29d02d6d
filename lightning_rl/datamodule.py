"""RLDataModule: prompts, engine and rewards behind Lightning's data interface."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.collect.base import CollectingDataModule, Hanging
from lightning_rl.collect.checks import check_rollouts
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import Collector, SyncCollector
from lightning_rl.collect.demonstrations import DemonstrationRows
from lightning_rl.collect.engine_start import EngineStart
from lightning_rl.collect.evaluation import Evaluation, HeldOut, as_evaluation
from lightning_rl.collect.loader import LazyLoader, RolloutLoader
from lightning_rl.collect.peek import Peek
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.selection import GroupSelection, as_selection
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.collect.tasks import Task, grader_of, tasks_of
from lightning_rl.config.arguments import configurable
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.data.curriculum import RepeatedPrompts
from lightning_rl.data.plans import GroupPlan, InTurn
from lightning_rl.data.prompts import Prompts
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.engines import default_engine
from lightning_rl.engines.base import Engine, RunState, drives_engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.learn.compatibility import check_run, check_sight, configure_engine
from lightning_rl.learn.overlap import NoOverlap
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.streamed import Stream
from lightning_rl.models.tokenizer import with_chat_variables
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import require_free
from lightning_rl.rewards.log import TrainerState
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.files.resume import check_early, enter_directory, leave_directory
from lightning_rl.run.files.rundir import output_path
from lightning_rl.run.hooks import call_hook
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.cores import share_cores
from lightning_rl.run.seeding import run_seed
from lightning_rl.sync.schedule import SyncState

STOP_SECONDS = 10.0
"""Maximum seconds for which a failed run waits until requests in flight have stopped."""


@configurable(train_prompts=prompts_of, selection=as_selection, evaluation=as_evaluation)
class RLDataModule(CollectingDataModule):
    """Collects graded rollouts, one batch of groups per iteration.

    Args:
        train_prompts: prompts to train on; a :class:`Mixture` for several sets, each with its own
            agent, rewards and sampling. Also the path of a file; in Python also a list of prompts
            or rows, or a table (the same holds for the other prompts).
        rewards: functions ``f(prompts, completions, **columns) -> list[float]``, plain or async; in
            Python also a single one, or import paths. None: every set of a mixture has its own.
        engine: generates; None: vLLM in process, or transformers if vLLM is not installed.
        agent: generates one rollout.
        plan: which rollouts a group has, how each is sampled, and which are trained on; None:
            ``group_size`` equal samples.
        sampling: sampling settings for training.
        group_size: rollouts per prompt (G).
        groups_per_iteration: prompts per iteration.
        iterations_per_epoch: iterations that Lightning counts as one epoch.
        collector: decides when each group is generated for training; None: the whole batch at once,
            by ``SyncCollector``, which is always used to collect without training.
        selection: which groups are trained on, and what replaces the others; in Python also a list
            of filters.
        evaluation: held-out prompts, and how they are evaluated; None: none. In Python also the
            prompts alone.
        demonstrations: completions to imitate in addition to the rollouts; None: none.
        buffer: keeps the groups of a run, and mixes older ones into each batch; None: no buffer.
        reward_weights: one per reward; None: all 1.
        max_failed_share: maximum share of an iteration's rollouts whose grading may fail; beyond it
            the run stops.
        chat_template_kwargs: further variables of the chat template, such as ``enable_thinking``,
            for all prompts and for the agent.
        seed: the seed from which every request's own seed is derived; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    nothing_to_evaluate = "set data.evaluation"
    _loader: RolloutLoader | None

    def __init__(
        self,
        train_prompts: AnyPrompts,
        rewards: list[Callable[..., list[float]]] | None = None,
        engine: Engine | None = None,
        agent: Agent = SingleTurn(),
        plan: GroupPlan | None = None,
        sampling: Sampling = Sampling(),
        group_size: int = 8,
        groups_per_iteration: int = 32,
        iterations_per_epoch: int = 100,
        collector: Collector | None = None,
        selection: GroupSelection = GroupSelection(),
        evaluation: Evaluation | None = None,
        demonstrations: DemonstrationRows | None = None,
        buffer: ReplayBuffer | None = None,
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
        )
        check_rollouts(groups_per_iteration, group_size)
        if reward_weights is not None and rewards is None:
            raise ConfigError(
                f"reward_weights={reward_weights} apply to rewards, which is null; set rewards, or "
                "set the weights in the prompt sets that have rewards"
            )
        self.train_prompts = train_prompts
        self.engine = engine if engine is not None else default_engine()
        self.agent = agent
        self.sampling = sampling
        self.group_size = group_size
        self.groups_per_iteration = groups_per_iteration
        self.iterations_per_epoch = iterations_per_epoch
        self.collector = collector if collector is not None else SyncCollector()
        self.selection = selection
        self.evaluation = evaluation
        self.demonstrations = demonstrations
        self.buffer = buffer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.seed = run_seed(seed)
        graded = None if rewards is None else Rewards(rewards, reward_weights, max_failed_share)
        bar = 1.0 if evaluation is None else evaluation.success_reward
        common = agent, plan or GroupPlan(), graded
        self.train_tasks = tasks_of(train_prompts, *common, sampling, group_size, bar)
        """One task per set of training prompts, or a single one."""
        self.rewards = grader_of(self.train_tasks)
        """Grades the training rollouts."""
        self.held_out = HeldOut([], self.train_tasks, self.seed)
        """Creates the groups of held-out prompts, and computes their metrics."""
        if evaluation is not None:
            own = evaluation.sampling or sampling
            tasks = tasks_of(evaluation.prompts, *common, own, evaluation.samples, bar)
            further = evaluation.limit, evaluation.metrics or []
            self.held_out = HeldOut(tasks, self.train_tasks, self.seed, *further)
        self.tasks = [*self.train_tasks, *self.held_out.tasks]
        """The tasks of training and of evaluation."""
        self._engine_start = EngineStart(self.engine, self.tasks, agent)
        self._collection: Collection | None = None
        self._stream: Stream | None = None
        self._began: float | None = None  # when the last iteration did
        self.first_iteration = 0  # of those collected without training
        self.predict_series: LazyLoader | None = None  # in place of these
        self.generated: list[Rollout] = []
        """All ranks' rollouts of the last iteration; without logprobs if there are several ranks.
        """

    def task_of(self, prompt: Prompt) -> Task:
        """Return the task of a training prompt.

        Raises:
            ConfigError: if there is no such prompt set.
        """
        result = next((task for task in self.train_tasks if task.name == prompt.set), None)
        if result is None:
            raise ConfigError(
                f"data.train_prompts has no prompt set {prompt.set!r}; its sets are "
                f"{', '.join(task.name for task in self.train_tasks)}"
            )
        return result

    def hanging(self) -> Hanging | None:
        calls = (rewards.hanging() for rewards in self._engine_start.rewards)
        found = next(filter(None, calls), None)
        advice = "Isolated gives a reward a time limit; if it may take that long"
        return found and Hanging(f"reward {found[0]}", found[1], advice)

    @property
    def collection(self) -> Collection:
        """The batches of this run; there after ``setup``."""
        assert self._collection is not None, "setup() comes first"
        return self._collection

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load the prompts and start the engine, after Lightning has created its process group."""
        module = self._module()
        assert self.trainer is not None
        share_cores(self.trainer)
        enter_directory(self.trainer)
        if self.buffer is not None:
            name = Path(self.buffer.path).name
            self.buffer.use_file(output_path(self.trainer, self.buffer.path, name))
        self.load_prompts(stage)
        check_early(self.trainer)
        trusts = any(policy.loading.trust_remote_code for policy in module.policies.values())
        self._engine_start.start(module.save_skeletons, trusts)
        self._collection = self._made_collection(module, stage == "fit")

    def load_prompts(self, stage: str) -> None:
        """Check the settings and load the prompts: the part of ``setup`` that needs no engine."""
        module = self._module()
        self.engine.serve(module.roles)
        parts = self.collector, self.selection, self.buffer, self.demonstrations, self.engine
        count, fits = self.groups_per_iteration, stage == "fit"
        check_run(module, self.train_tasks, *parts, count, fits)
        module.day.date = dist.from_rank_zero(module.day.date)
        self._tokenizer = tokenizer = self.load_tokenizer(module)
        check_sight(self.engine, tokenizer)
        with dist.every_rank():
            if dist.rank() == 0:  # it reads the weights once
                module.require_sound_models()
        assert self.trainer is not None
        configure_engine(self.engine, module, compute_dtype(self.trainer))
        for agent in self._engine_start.agents:
            agent.configure(tokenizer)
        for task in self.train_tasks:
            task.plan.configure(tokenizer)
        given = None if self.demonstrations is None else self.demonstrations.prompts
        held_out = None if self.evaluation is None else self.evaluation.prompts
        for prompts in (self.train_prompts, given, held_out):
            if prompts is not None:
                prompts.load(tokenizer, self.agent.chat_options)
                if prompts is not given:
                    require_free(prompts.row_columns(), repr(prompts))
        # Where the configuration tells the engine's length, do not start it only to refuse.
        limit = getattr(self.engine, "max_model_len", None)
        if limit is not None:
            for task in self.tasks:
                task.room_within(limit)

    def _made_collection(self, module: RolloutModule, fits: bool) -> Collection:
        """Return the collection of a run; the policies' advantages may add to its plans."""
        assert self.trainer is not None
        policies = list(module.policies.values())
        added = [p.advantage for p in policies if fits and isinstance(p.advantage, GroupPlan)]
        tasks = [replace(task, plan=InTurn([task.plan, *added])) for task in self.train_tasks]
        prompts: Prompts = self.train_prompts
        if fits and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            prompts = RepeatedPrompts(prompts, self._epoch() * self.groups_per_iteration)
        # Where one engine serves all ranks, rank 0 issues all groups.
        alone = self.engine.serves_all_ranks
        rank, ranks = (0, 1) if alone else (dist.rank(), dist.world_size())
        groups = self.groups_per_iteration // ranks, self.group_size, self.sampling, self.seed
        source = GroupSource(prompts, *groups, self._last_iteration, rank, ranks, tasks)
        works = fits and drives_engine(self.engine)
        streams = fits and isinstance(self.collector, StreamedCollector)
        self._stream = Stream(lambda: policies[0].learner) if streams else None
        # Ranks that wait may not agree on a push.
        hears = works and dist.world_size() == 1
        return Collection(
            self._pipeline(tasks),
            self.collector if works else SyncCollector(),
            source,
            self.selection,
            self.buffer if fits else None,
            self.demonstrations,
            self._stream,
            partial(call_hook, self.trainer, "on_collect_wait") if hears else None,
        )

    def _pipeline(self, tasks: Sequence[Task]) -> RolloutPipeline:
        parts = self.engine, tasks[0].agent, grader_of(tasks), self._tokenizer
        return RolloutPipeline(*parts, self._module().clock, tasks)

    def load_tokenizer(self, module: RolloutModule) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the module's model, with the ``chat_template_kwargs``."""
        return with_chat_variables(module.load_tokenizer(), self.chat_template_kwargs, module.day)

    def on_exception(self, exception: BaseException) -> None:
        """Stop all background work when a run fails or is interrupted."""
        try:
            if self._collection is not None:
                self._collection.close(timeout=STOP_SECONDS)
        except TimeoutError:
            rank_zero_warn(
                "rollouts in flight could not be stopped, because a reward or agent blocks"
            )

    def teardown(self, stage: str) -> None:
        if self._collection is not None:
            self._collection.close()
        self._engine_start.close()
        if self.buffer is not None:
            self.buffer.close()
        if self.trainer is not None:
            leave_directory(self.trainer)

    def new_loader(self) -> RolloutLoader:
        module = self._module()
        for policy in module.policies.values():
            policy.learner.overlap = self._stream or NoOverlap()
        return RolloutLoader(
            self.collect,
            self.collection,
            self.iterations_per_epoch,
            lambda: module.iteration,
            self._epoch(),
            list(module.roles),
        )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.collection.state_of_others()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.collection.load_state_of_others(state_dict)

    def predict_dataloader(self) -> Any:
        """Return a loader of batches of graded rollouts, for ``lightning-rl rollout``."""
        return self.predict_series or LazyLoader(
            lambda place: self.collect(self.first_iteration + place), self.iterations_per_epoch
        )

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, TensorDict) else batch

    # ---------------------------------------------------------------- collecting

    def collect(self, iteration: int) -> list[Rollout]:
        """Generate and grade one iteration's rollouts, and notify the callbacks."""
        module, trainer, collection = self._module(), self.trainer, self.collection
        assert trainer is not None
        call_hook(trainer, "on_collect_start")
        last, length = self._last_iteration() or -1, self.iterations_per_epoch
        epochs = -1 if last < 0 else -(-last // length)
        state = TrainerState(iteration, last, iteration / length, epochs, dist.rank() == 0)
        before, self._began = self._began, time.monotonic()
        for rewards in self._engine_start.rewards:
            if before is not None:
                rewards.end_iteration(self._began - before)
            rewards.state = state
        collected = collection.collect(iteration)
        groups, metrics = collection.of_all_ranks(module.iteration, module.role_versions)
        module.record(metrics)
        self.generated = [rollout for group in groups for rollout in group]
        call_hook(trainer, "on_collect_end", collected)
        rollouts = collection.batch(iteration, module.iteration)
        if collection.buffer is not None:
            module.record(collection.buffer.metrics)
        return rollouts

    def _last_iteration(self) -> int | None:
        """Return the number of iterations after which the run ends; None if it has no limit."""
        epochs = None if self.trainer is None else self.trainer.max_epochs
        if self._loader is None or epochs is None or epochs <= 0:
            return None
        return self._loader.first + epochs * self._epoch()

    def sync_state(self, trainer_version: int, policy: str = "") -> SyncState:
        """Return the state by which a sync schedule decides; may be called at any time.

        ``policy`` is the name of the policy whose version is asked for, if there are several.
        """
        trainer = RunState.STOPPED
        if self.trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING:
            waits = self._module().clock.stage in ("generate", "reward", "sync")
            trainer = RunState.WAITING if waits else RunState.RUNNING
        return SyncState(
            trainer_version,
            self.engine.of_policy(policy).version,
            run_async(self.collector.status()),
            trainer,
            tuple(self.engine.replica_states()),
        )

    @property
    def evaluates(self) -> bool:
        return self.evaluation is not None

    def evaluate(self) -> tuple[list[Rollout], dict[str, float]]:
        """Generate and grade rollouts of the held-out prompts, always with the same seeds.

        Raises:
            ConfigError: without an ``evaluation``, or if one of its ``metrics`` fails.
        """
        if self.evaluation is None:
            raise ConfigError(f"there is nothing to evaluate on; {self.nothing_to_evaluate}")
        with self._module().clock("eval"), self.collection.yielding():
            return self.held_out.run(self._pipeline(self.held_out.tasks))

    def scores(self, done: list[Rollout]) -> dict[str, dict[str, float]]:
        return self.held_out.scores(done)

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
        result: Peek = look(self, module, groups, group_size or self.group_size)
        return result

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
