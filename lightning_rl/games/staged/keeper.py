"""JobKeeper: creates each fine-tuning job once, and waits for its end within a time limit."""

import asyncio
import time
from collections.abc import Callable

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_rl.errors import FineTuneError
from lightning_rl.games.staged.jobs import FineTuneJobs, JobReport, JobRequest, JobStatus
from lightning_rl.games.staged.state import BoughtJob, GroupState
from lightning_rl.games.staged.training_sets import TrainingSet


class JobKeeper:
    """Records jobs before and after each change of theirs.

    Args:
        save: writes the records to disk.
        job_timeout_s: a job is cancelled this many seconds after its creation.
        poll_s: seconds between requests for a job's status.
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
        """Make sure that a group has a job in an iteration, creating one if all others have failed.

        Args:
            key: the job's key, without the number of the attempt.
            iteration: the iteration that it belongs to.
            held: the group's record.
            training: the training set.
            seed: determines the job's random choices.
            jobs: creates the job.
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
        """Return the model that a job has made, once it ends; None if it failed or was cancelled.

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
                f"job {job.id} succeeded, but {type(jobs).__name__} reports no model of it"
            )
        self._note(job, told)
        return told.model if told.status is JobStatus.SUCCEEDED else None

    async def _cancelled(self, job: str, jobs: FineTuneJobs) -> JobReport:
        """Cancel a job that took too long, and return how it ended: it may have just finished."""
        await jobs.cancel(job)
        report = await jobs.report(job)
        if report.status in (JobStatus.SUCCEEDED, JobStatus.FAILED):
            return report
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
    """Return the error for a run whose job made no model."""
    return FineTuneError(
        f"job {job.id} of group {group!r} in iteration {job.iteration} {job.status}: "
        f"{job.error or 'no reason was given'}; to create another, run again with a larger "
        "job_attempts; to continue with the old model, set keep_model_after_failure"
    )
