"""Slurm's queue: whose the signal is by which Slurm says that a job's time is nearly over."""

import os
import signal
import subprocess

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

_PATIENCE_S = 60.0
"""How long ``scontrol`` may take; the controller may be busy."""


class _NoHandlers(_SignalConnector):
    """Lightning's place for signal handlers, left empty.

    Its own save, requeue and broadcast within the handler: in each process by itself, wherever that
    happens to be. A save of several processes needs all of them at one place.
    """

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


def take_signals(trainer: Trainer) -> None:
    """Have Lightning handle no signals in this run; ``IterationCheckpoint`` does."""
    trainer._signal_connector = _NoHandlers(trainer)


def requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """The signal after which the job goes back into the queue: under ``srun``, unless forbidden."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def requeue_job(trainer: Trainer, goes_on: bool) -> None:
    """Put this job back into the queue; all ranks have saved. Rank 0 does it.

    ``goes_on``: whether the same command goes on with what was saved; else it would begin anew.
    """
    if not trainer.is_global_zero:
        return
    job = _job_id()
    if not goes_on:
        rank_zero_warn(
            f"job {job} is not put back into the queue: without --ckpt_path last the same command "
            "would begin anew. Give that from the first start on (it then begins a run), or "
            "trainer.plugins: SLURMEnvironment with auto_requeue: false"
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
        rank_zero_warn(f"`scontrol requeue {job}` failed ({why}); submit the job again yourself")
    else:
        rank_zero_info(f"job {job} is back in the queue")


def _job_id() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        os.environ["SLURM_JOB_ID"]
        if array is None
        else (f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}")
    )
