"""Requeueing under Slurm, after the signal that a job's time is nearly over."""

import os
import signal
import subprocess

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

_PATIENCE_S = 60.0
"""Seconds that ``scontrol`` may take; the controller may be busy."""


def requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """Return the signal after which the job is requeued: under ``srun``, unless forbidden; else
    None.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def requeue_job(trainer: Trainer, goes_on: bool) -> None:
    """Requeue this job, on rank 0, once all ranks have saved.

    ``goes_on``: True if the same command resumes from the checkpoint; otherwise it would start
    anew.
    """
    if not trainer.is_global_zero:
        return
    job = _job_id()
    if not goes_on:
        rank_zero_warn(
            f"job {job} is not requeued: without --ckpt_path last the same command would start "
            "anew. Pass it from the first start on (a run begins if there is no checkpoint), or "
            "set trainer.plugins: SLURMEnvironment with auto_requeue: false"
        )
        return
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_PATIENCE_S
        )
        why = f"status {done.returncode}: {(done.stderr or done.stdout).strip()}"
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        why, failed = str(error), True
    if failed:
        rank_zero_warn(f"`scontrol requeue {job}` failed ({why}); submit the job again by hand")
    else:
        rank_zero_info(f"job {job} was requeued")


def _job_id() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        os.environ["SLURM_JOB_ID"]
        if array is None
        else (f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}")
    )
