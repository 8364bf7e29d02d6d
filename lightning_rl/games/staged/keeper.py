"""JobKeeper: buys fine-tune jobs once, and waits for their ends, but not for ever."""

import asyncio
import time
from collections.abc import Callable

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.errors import FineTuneError
from lightning_rl.games.staged.jobs import FineTuneJobs, JobReport, JobRequest, JobStatus
from lightning_rl.games.staged.state import BoughtJob, GroupState
from lightning_rl.games.staged.training_sets import TrainingSet


class JobKeeper:
    """Keeps note of jobs before and after all that happens to them.

    Args:
        save: puts the notes on the disk.
        job_timeout_s: a job is cancelled so many seconds after its creation.
        poll_s: seconds between looks at a job.
    """

    def __init__(self, save: Callable[[], None], job_timeout_s: float, poll_s: float) -> None:
        self.save = save
        self.job_timeout_s = job_timeout_s
        self.poll_s = poll_s

    async def have(
        self,
        key: str,
        iteration: int,
        held: GroupState,
        training: TrainingSet,
        seed: int,
        jobs: FineTuneJobs,
    ) -> None:
        """See to it that a group has a job in an iteration that did not fail.

        Args:
            key: the job's, but for how often it was tried.
            iteration: that it belongs to.
            held: the group's notes.
            training: what it learns from.
            seed: of what it leaves to chance.
            jobs: who creates it.
        """
        tried = held.jobs_of(iteration)
        if tried and not tried[-1].failed:
            job = tried[-1]
        else:
            job = BoughtJob(iteration, f"{key}-{len(tried)}", len(training), time.time())
            held.jobs.append(job)
            # Before it is created: a kill after that leaves a job that is found by this key.
            self.save()
        if job.id is None:
            request = JobRequest(job.key, held.models[iteration], training, seed)
            job.id = await jobs.create(request)
            self.save()

    async def end_of(self, job: BoughtJob, jobs: FineTuneJobs) -> str | None:
        """The model that a job has made; None once it failed or was cancelled.

        Raises:
            FineTuneError: if it succeeded without a model.
        """
        assert job.id is not None, "it was created in the stage before"
        while not (told := await jobs.report(job.id)).status.over:
            self._note(job, told)
            if time.time() - job.created > self.job_timeout_s:
                told = await self._cancelled(job.id, jobs)
                break
            await asyncio.sleep(self.poll_s)
        if told.status is JobStatus.SUCCEEDED and not told.model:  # else it would be for ever over
            raise FineTuneError(
                f"job {job.id} succeeded, but {type(jobs).__name__} names no model that it made"
            )
        self._note(job, told)
        return told.model if told.status is JobStatus.SUCCEEDED else None

    async def _cancelled(self, job: str, jobs: FineTuneJobs) -> JobReport:
        """How a job is doing that took too long: cancelled, or over at the last moment."""
        await jobs.cancel(job)
        told = await jobs.report(job)
        if told.status in (JobStatus.SUCCEEDED, JobStatus.FAILED):
            return told
        why = f"it was not done within job_timeout_s={self.job_timeout_s:g}"
        return JobReport(JobStatus.CANCELLED, error=why)

    def _note(self, job: BoughtJob, told: JobReport) -> None:
        if (job.status, job.error) == (told.status, told.error):
            return
        job.status, job.error = told.status, told.error
        self.save()
        error = f": {told.error}" if told.error else ""
        rank_zero_info(f"iteration {job.iteration}: job {job.id} {told.status}{error}")


def ended_by(group: str, job: BoughtJob) -> FineTuneError:
    """What ends a run whose job made no model."""
    return FineTuneError(
        f"job {job.id} of group {group!r} in iteration {job.iteration} {job.status}: "
        f"{job.error or 'no reason was given'}; run again with a larger job_attempts to create "
        "another, or with keep_model_after_failure to go on without"
    )
