"""FineTuneJobs: where fine-tune jobs are bought, and what becomes of one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lightning_rl.games.staged.training_sets import TrainingSet


class JobStatus(StrEnum):
    """The stage of a job's life; the last three are ends."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Nothing will change any more."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job is to do.

    ``key`` is its name for us, unlike that of any other job of any run: by it a job is found again
    whose id was lost. ``model`` is what it starts from.
    """

    key: str
    model: str
    training: TrainingSet
    seed: int


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a job is doing: ``model`` is what it made, ``error`` why it made none."""

    status: JobStatus
    model: str | None = None
    error: str = ""


class FineTuneJobs(ABC):
    """Creates fine-tune jobs, and tells what becomes of them."""

    def open(self, directory: Path) -> None:
        """Called before anything else, with the run's directory; here: nothing."""

    @abstractmethod
    async def create(self, request: JobRequest) -> str:
        """The id of the job with this request's key; it is created unless there is one already.

        A job is bought once, wherever an earlier call was cut off.

        Raises:
            LightningRLError: if there can be none.
        """

    @abstractmethod
    async def report(self, job: str) -> JobReport:
        """How the job of this id is doing."""

    @abstractmethod
    async def cancel(self, job: str) -> None:
        """End it; one that is over stays as it is."""
