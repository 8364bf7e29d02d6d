"""StagedState: the state of a staged run, as one JSON file that is written atomically."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from lightning_rl.config.schema import one_line, parsed
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games.staged.jobs import JobStatus
from lightning_rl.run.files.rundir import write_whole

FIRST_STAGE, LAST_STAGE = "sample_rollouts", "done"


@dataclass(slots=True)
class BoughtJob:
    """The record of a fine-tuning job, written before the job is created.

    ``id`` is None until the creation was recorded: the job may exist nevertheless, and is then
    found by its ``key``. ``created`` is in seconds since 1970.
    """

    # What another release has noted besides cannot be gone on with in this one.
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    iteration: int
    key: str
    rows: int
    created: float
    id: str | None = None
    status: JobStatus = JobStatus.PENDING
    error: str = ""

    @property
    def failed(self) -> bool:
        """True if the job is over and made no model."""
        return self.status in (JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(slots=True)
class GroupState:
    """The models of a group, ``models[i]`` after i iterations, and all its jobs."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    models: list[str]
    jobs: list[BoughtJob] = field(default_factory=list)

    def jobs_of(self, iteration: int) -> list[BoughtJob]:
        """Return all jobs of an iteration, one per attempt."""
        return [job for job in self.jobs if job.iteration == iteration]


@dataclass(slots=True)
class StagedState:
    """A run's id, iteration, stage, and groups.

    The ``iteration`` is the one that ``stage`` belongs to, counted from 0.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    run: str
    groups: dict[str, GroupState]
    iteration: int = 0
    stage: str = FIRST_STAGE

    @property
    def done(self) -> bool:
        """True if the run is complete."""
        return self.stage == LAST_STAGE

    @classmethod
    def at(cls, path: Path, models: Mapping[str, str], iterations: int) -> "StagedState":
        """Return the state that a file holds; without a file, that of a new run, which is saved.

        Args:
            path: the file.
            models: the initial model of each group.
            iterations: a completed run continues if it has had fewer.

        Raises:
            ConfigError: if the run has other groups.
            DataError: if the file does not hold a valid state.
        """
        if not path.exists():
            groups = {name: GroupState([model]) for name, model in models.items()}
            state = cls(uuid4().hex[:12], groups)
            state.save(path)
            return state
        state = cls.load(path, list(models))
        if state.done and state.iteration < iterations:
            state.stage = FIRST_STAGE
        return state

    def save(self, path: Path) -> None:
        """Write the state atomically.

        Raises:
            DiskError: if it cannot be written; the file is unchanged.
        """
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, groups: Sequence[str]) -> "StagedState":
        """Read what :meth:`save` wrote.

        Args:
            path: the file.
            groups: the groups that the run must have.

        Raises:
            ConfigError: if the run has other groups.
            DataError: if the file does not hold a valid state.
        """
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file; use another run_dir")
        try:
            state = parsed(cls, path.read_text(encoding="utf-8"))
            state.check()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} does not hold the state of a staged run ({one_line(error)}); restore it, "
                "or use another run_dir"
            ) from error
        if state.groups.keys() != set(groups):
            raise ConfigError(
                f"{path} belongs to a run with groups {', '.join(state.groups)}, not "
                f"{', '.join(groups)}; restore them, or use another run_dir"
            )
        return state

    def check(self) -> None:
        """Check that the numbers are consistent.

        Raises:
            ValueError: if no run can have them.
        """
        if not self.run or self.iteration < 0:
            raise ValueError(f"run={self.run!r}, iteration={self.iteration}")
        for name, group in self.groups.items():
            if len(group.models) != self.iteration + 1:
                raise ValueError(
                    f"groups.{name}.models has {len(group.models)} models after "
                    f"{self.iteration} iterations, not {self.iteration + 1}"
                )
            for job in group.jobs:
                if not 0 <= job.iteration <= self.iteration:
                    raise ValueError(f"job {job.key} belongs to iteration {job.iteration}")
