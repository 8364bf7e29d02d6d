"""StagedTrainer: iterations of stages, each done exactly once, even if the run is interrupted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.callbacks.report import LABELS
from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import require_pydantic
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.engines.sampling import seed_of
from lightning_rl.errors import (
    ConfigError,
    DataError,
    FineTuneError,
    local_path,
    require_at_least,
)
from lightning_rl.games.protocols.base import Protocol
from lightning_rl.games.protocols.scenario import Scenario
from lightning_rl.games.staged.algorithm import StagedAlgorithm
from lightning_rl.games.staged.callbacks import StagedCallback, StagedLoggers
from lightning_rl.games.staged.chat import ChatGroup, require_groups
from lightning_rl.games.staged.keeper import JobKeeper, ended_by
from lightning_rl.games.staged.report import StagedReport, retest_directory, verdict_metrics
from lightning_rl.games.staged.sampler import InteractionSampler, Tree, remove_rollouts
from lightning_rl.games.staged.state import FIRST_STAGE, LAST_STAGE, StagedState
from lightning_rl.games.staged.units import Unit, all_units, rows_of, train_units
from lightning_rl.rewards.openai_api import APIRefusal
from lightning_rl.run.files.rundir import holding, write_whole
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.retry import ServerError
from lightning_rl.run.seeding import run_seed

STATE = "state.json"
ROLLOUTS, TESTS, RETESTS = "rollouts", "tests", "retests"


@configurable(train=prompts_of, test=prompts_of)
class StagedTrainer:
    """Trains models by fine-tuning jobs, in stages: for models that only an API reaches.

    An iteration is ``sample_rollouts``, ``log_stats``, ``test_during_training``,
    ``create_fine_tune_jobs`` and ``await_fine_tune_jobs``; after the last one come ``test`` and
    ``done``. Each stage is a method that returns the name of the next. The state is saved after
    each stage and around each job's creation, and every interaction as soon as it is over: calling
    :meth:`fit` again resumes a run however it ended, and no job is created twice.

    Args:
        run_dir: the run's directory: its state, rollouts, metrics, and local jobs.
        protocol: who speaks when, and the rewards.
        scenario: what the agents are told, and how their answers are read.
        train: rows of data to sample interactions about.
        groups: the agents by the models that they share.
        algorithm: what is sampled, and what is learned from it.
        test: held-out rows; None: nothing is tested.
        iterations: number of iterations.
        rows_per_iteration: rows drawn in each, reshuffled for each pass over the data; None: all.
        test_limit: use only the first ``test_limit`` rows of ``test``; None: all.
        test_every_n_iterations: also test before every n-th iteration; None: only at the end.
        min_rows: no job is created for fewer rows; the model is kept.
        job_attempts: jobs created for the same rows, if they fail or are cancelled.
        keep_model_after_failure: keep the model after the last attempt failed; false: raise a
            ``FineTuneError``; the run can then be resumed with other settings.
        job_timeout_s: a job is cancelled this many seconds after its creation.
        poll_s: seconds between requests for a job's status.
        max_concurrency: the most interactions, and the most questions, at the same time.
        rollout_format: format of the files of interactions: ``jsonl``, ``parquet`` or ``sqlite``.
        seed: determines all random choices; None: the seed of ``seed_everything``.
        logger: one or several of Lightning's loggers, which get the metrics; W&B and MLflow store
            the state, too.
        callbacks: further hooks, such as your own statistics.

    Raises:
        ConfigError: if a value is out of range, or an agent is not in exactly one group.
    """

    def __init__(
        self,
        run_dir: str,
        protocol: Protocol,
        scenario: Scenario,
        train: AnyPrompts,
        groups: dict[str, ChatGroup],
        algorithm: StagedAlgorithm,
        test: AnyPrompts | None = None,
        iterations: int = 1,
        rows_per_iteration: int | None = None,
        test_limit: int | None = None,
        test_every_n_iterations: int | None = 1,
        min_rows: int = 10,
        job_attempts: int = 1,
        keep_model_after_failure: bool = False,
        job_timeout_s: float = 86_400.0,
        poll_s: float = 5.0,
        max_concurrency: int = 16,
        rollout_format: Literal["jsonl", "parquet", "sqlite"] = "jsonl",
        seed: int | None = None,
        logger: list[Logger] | Logger | None = None,
        callbacks: list[StagedCallback] | None = None,
    ) -> None:
        require_at_least(0, iterations=iterations, poll_s=poll_s, job_timeout_s=job_timeout_s)
        require_at_least(
            1,
            rows_per_iteration=rows_per_iteration,
            test_limit=test_limit,
            test_every_n_iterations=test_every_n_iterations,
            min_rows=min_rows,
            job_attempts=job_attempts,
            max_concurrency=max_concurrency,
        )
        require_pydantic("StagedTrainer")
        require_groups(groups, protocol.agent_names)
        self.run_dir = local_path(run_dir, "run_dir")
        self.train = train
        self.test_rows = test
        self.groups = groups
        self.algorithm = algorithm
        self.iterations = iterations
        self.rows_per_iteration = rows_per_iteration
        self.test_limit = test_limit
        self.test_every_n_iterations = test_every_n_iterations
        self.min_rows = min_rows
        self.job_attempts = job_attempts
        self.keep_model_after_failure = keep_model_after_failure
        self.rollout_format = rollout_format
        self.seed = run_seed(seed)
        chats = {agent: group.chat for group in groups.values() for agent in group.agents}
        self.sampler = InteractionSampler(protocol, scenario, chats, max_concurrency, self.seed)
        self.keeper = JobKeeper(self._save, job_timeout_s, poll_s)
        self.report = StagedReport(self.run_dir)
        loggers = logger if isinstance(logger, list) else [] if logger is None else [logger]
        self.callbacks = [*(callbacks or ()), *([StagedLoggers(loggers)] if loggers else ())]
        self.state = StagedState("", {})

    # ---------------------------------------------------------------- from outside

    def fit(self) -> StagedState:
        """Run the remaining stages, and return the state at the end.

        Raises:
            ConfigError: if another process runs in the directory.
            DataError: if the directory's files are damaged.
            FineTuneError: if a job fails and ``job_attempts`` and ``keep_model_after_failure``
                allow no other way; or if a server cannot be reached. The state is kept: ``fit``
                resumes from it.
        """
        models = {name: group.model for name, group in self.groups.items()}
        with self._entered(self.run_dir), self._told(), self._outages_told():
            self.state = StagedState.at(self.run_dir / STATE, models, self.iterations)
            for callback in self.callbacks:
                callback.on_run_start(self)
            for group in self.groups.values():
                if group.jobs is not None:
                    group.jobs.open(self.run_dir)
            while not self.state.done:
                self._do(self.state.stage)
        return self.state

    def retest(self, directory: str | Path | None = None) -> list[dict[str, Any]]:
        """Test the models of each iteration again; returns a row of metrics for each.

        Nothing is written into the run's own directory, and a run in progress is not disturbed.

        Args:
            directory: where ``retests.json`` and the interactions go; None: beside the run's, with
                ``_retest`` appended to its name.

        Raises:
            ConfigError: if there is no run, nothing to test on, or the directory is the run's.
            FineTuneError: if a server cannot be reached.
        """
        if not (self.run_dir / STATE).exists():
            raise ConfigError(
                f"run_dir={str(self.run_dir)!r} holds no staged run to test; give one that does"
            )
        if self.test_rows is None:
            raise ConfigError("test=null: there is nothing to test on; set test to rows of data")
        where = retest_directory(self.run_dir, directory)
        self.state = StagedState.load(self.run_dir / STATE, list(self.groups))
        with self._entered(where), self._outages_told():
            remove_rollouts(self._file(RETESTS, where))
            tested = range(min(len(group.models) for group in self.state.groups.values()))
            rows = [{"iteration": i} | self._tested(i, RETESTS, where) for i in tested]
            write_whole(where / "retests.json", dumps(rows, indent=1) + "\n")
        rank_zero_info(f"rows and interactions of the test are in {where}")
        return rows

    # ---------------------------------------------------------------- stages

    def sample_rollouts(self) -> str:
        """Sample interactions about the iteration's rows."""
        if self.state.iteration >= self.iterations:
            return "test"
        self._sampled()
        return "log_stats"

    def log_stats(self) -> str:
        """Log the metrics of the sampled interactions."""
        metrics = self._metrics("train", self._sampled(), self.state.iteration)
        self._note({"reward/mean": metrics["train/reward_mean"]} | metrics)
        return "test_during_training"

    def test_during_training(self) -> str:
        """Test the same models on held-out rows."""
        every = self.test_every_n_iterations
        if self.test_rows is not None and every is not None and self.state.iteration % every == 0:
            self._note(self._tested(self.state.iteration, TESTS))
        return "create_fine_tune_jobs"

    def create_fine_tune_jobs(self) -> str:
        """Create a job for each group that has enough rows to learn from."""
        trees, iteration = [tree.leaves for tree in self._sampled()], self.state.iteration
        for name, group in self.groups.items():
            if group.jobs is None:
                continue
            seed = seed_of(f"{self.seed}/{iteration}/{name}".encode())
            training = self.algorithm.training_set(trees, group.agents, iteration, seed)
            if len(training) < self.min_rows:
                rank_zero_info(
                    f"iteration {iteration}: {name} keeps its model: it has {len(training)} rows "
                    f"to learn from, fewer than min_rows={self.min_rows}"
                )
                continue
            key = f"{self.state.run}-{iteration}-{name}"
            held = self.state.groups[name]
            run_async(self.keeper.have(key, iteration, held, training, seed, group.jobs))
        return "await_fine_tune_jobs"

    def await_fine_tune_jobs(self) -> str:
        """Wait for all jobs; then replace the models by those that they made."""
        iteration, made = self.state.iteration, {}
        for name, group in self.groups.items():
            held = self.state.groups[name]
            tried = held.jobs_of(iteration)
            model = None
            if group.jobs is not None and tried:
                model = run_async(self.keeper.end_of(tried[-1], group.jobs))
                if model is None and len(tried) < self.job_attempts:
                    return "create_fine_tune_jobs"
                if model is None and not self.keep_model_after_failure:
                    raise ended_by(name, tried[-1])
            made[name] = model or held.models[iteration]
        for name, model in made.items():
            self.state.groups[name].models.append(model)
        self.state.iteration += 1
        return FIRST_STAGE

    def test(self) -> str:
        """Test the last models on held-out rows, and write the summary."""
        if self.test_rows is not None:
            self._note(self._tested(self.state.iteration, TESTS))
        self.report.write_summary(self.state)
        return LAST_STAGE

    # ---------------------------------------------------------------- inside

    @contextmanager
    def _entered(self, directory: Path) -> Iterator[None]:
        """Hold the directory's lock inside the block, and close the chat models after it."""
        with holding(directory):
            try:
                yield
            finally:
                for group in self.groups.values():
                    group.chat.close()

    @contextmanager
    def _outages_told(self) -> Iterator[None]:
        """Raise one error that says where to resume if a server cannot be reached."""
        try:
            yield
        except (ServerError, APIRefusal) as outage:
            raise FineTuneError(
                f"{outage}; the run stopped in stage {self.state.stage} of iteration "
                f"{self.state.iteration}; nothing is lost: run the same command to resume"
            ) from outage

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the callbacks how the run ended, after the block."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as fault:
            error = fault
            raise
        finally:
            for callback in self.callbacks:
                callback.on_run_end(self, error)

    def _do(self, stage: str) -> None:
        """Run a stage, and record which is next."""
        public = not stage.startswith("_") and stage not in ("fit", "retest")
        method = getattr(type(self), stage, None) if public else None
        if not callable(method):
            raise DataError(
                f"{self.run_dir / STATE}: {type(self).__name__} has no stage {stage!r}; "
                "restore the file, or use another run_dir"
            )
        self.state.stage = method(self)
        self._save()
        for callback in self.callbacks:
            callback.on_stage_end(self, stage)

    def _save(self) -> None:
        self.state.save(self.run_dir / STATE)

    def _note(self, metrics: dict[str, float]) -> None:
        """Record and print metrics of the models after ``iteration`` iterations."""
        self.report.note(self.state.iteration, metrics)
        shown = {n: v for n, v in metrics.items() if n in LABELS}
        figures = ", ".join(f"{LABELS[name]} {value:.4g}" for name, value in shown.items())
        rank_zero_info(f"iteration {self.state.iteration}: {figures}")
        for callback in self.callbacks:
            callback.on_metrics(self, self.state.iteration, metrics)

    def _sampled(self) -> list[Tree]:
        """Return the iteration's interactions, sampling those that are missing."""
        iteration, algorithm = self.state.iteration, self.algorithm
        rows, count = rows_of(self.train), self.rows_per_iteration
        units = train_units(rows, iteration, count, algorithm.samples, self.seed)
        return self._sample(self._file(ROLLOUTS), units, algorithm.width, iteration)

    def _tested(self, iteration: int, name: str, directory: Path | None = None) -> dict[str, float]:
        """Return metrics of the models after ``iteration`` iterations, on held-out rows."""
        assert self.test_rows is not None
        units = all_units(rows_of(self.test_rows)[: self.test_limit])
        trees = self._sample(self._file(name, directory), units, 1, iteration)
        return self._metrics("eval", trees, iteration)

    def _metrics(self, of: str, trees: Sequence[Tree], iteration: int) -> dict[str, float]:
        metrics = verdict_metrics([r for tree in trees for r in tree.rollouts(iteration)])
        for callback in self.callbacks:
            metrics |= callback.statistics(self, of, iteration, trees)
        return {f"{of}/{name}": value for name, value in metrics.items()}

    def _sample(self, path: Path, units: Sequence[Unit], width: int, iteration: int) -> list[Tree]:
        """Return interactions with the models after ``iteration`` iterations; sample only missing
        ones.
        """
        trees = self.sampler.held(path, iteration)
        missing = [unit for unit in units if unit.name not in trees]
        if missing:
            for name, group in self.groups.items():
                group.chat.use(self.state.groups[name].models[iteration])
            trees |= run_async(self.sampler.sample(path, missing, width, iteration))
        return [trees[unit.name] for unit in units]

    def _file(self, name: str, directory: Path | None = None) -> Path:
        return (directory or self.run_dir) / f"{name}.{self.rollout_format}"
