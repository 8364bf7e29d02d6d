"""FineTuneJobs: creates fine-tuning jobs, and reports how they are doing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lightning_rl.games.staged.training_sets import TrainingSet


class JobStatus(StrEnum):
    """The status of a job; the last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """True if the status is final."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """The specification of a job.

    ``key`` is the job's unique name over all runs: a job whose id was lost is found by it.
    ``model`` is what training starts from.
    """

    key: str
    model: str
    training: TrainingSet
    seed: int


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a job is doing: ``model`` is the model that it made, ``error`` why it made none."""

    status: JobStatus
    model: str | None = None
    error: str = ""


class FineTuneJobs(ABC):
    """Creates fine-tuning jobs, and reports how they are doing."""

    def open(self, directory: Path) -> None:
        """Called before anything else, with the run's directory; does nothing here."""

    @abstractmethod
    async def create(self, request: JobRequest) -> str:
        """Return the id of the job with this request's key; create the job if there is none.

        No job is created twice, wherever an earlier call was interrupted.

        Raises:
            LightningRLError: if the job cannot be created.
        """

    @abstractmethod
    async def report(self, job: str) -> JobReport:
        """Return how the job with this id is doing."""

    @abstractmethod
    async def cancel(self, job: str) -> None:
        """Cancel a job; one that is over is left as it is."""
