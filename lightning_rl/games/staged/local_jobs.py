"""LocalJobs: fine-tuning jobs on this machine, each a Lightning fit in its own process."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.config.schema import one_line, parsed
from lightning_rl.data.rollouts.jsonl import as_lines
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games.staged import job_process
from lightning_rl.games.staged.job_process import LOG, MODEL, PARTIAL, PID, RESULT, STARTS
from lightning_rl.games.staged.jobs import FineTuneJobs, JobReport, JobRequest, JobStatus
from lightning_rl.run.files.rundir import sync_directory, write_whole

_MOST_STARTS = 3
"""The most times that a job's process is started, e.g. after its machine restarted."""
_CONFIG, _ROWS = "config.yaml", "rows.jsonl"


@configurable
class LocalJobs(FineTuneJobs):
    """Trains by ``lightning-rl fit`` with ``SFTModule`` or ``DPOModule``; the result is a
    directory.

    A job is a directory, ``jobs/<key>`` in the run's: its configuration, rows, log, and at the end
    ``model`` and ``result.json``. Its process outlives the run's process; a resumed run finds it
    running or done.

    Args:
        supervised: changes to jobs that learn from demonstrations: keys of ``lightning-rl fit``,
            such as ``{trainer: {max_epochs: 3}, model: {init_args: {...}}}``.
        preference: the same for jobs that learn from pairs (DPO).
        threads: CPU threads of each job.

    Raises:
        ConfigError: for keys that ``fit`` does not have.
    """

    def __init__(
        self,
        # Not of Any: of a class_path in that jsonargparse would make an object.
        supervised: dict[str, dict] | None = None,
        preference: dict[str, dict] | None = None,
        threads: int = 1,
    ) -> None:
        self.settings = {"supervised": supervised or {}, "dpo": preference or {}}
        for given in self.settings.values():
            if strange := given.keys() - {"model", "data", "trainer"}:
                raise ConfigError(
                    f"LocalJobs: {sorted(strange)} are not keys of a fit; use model, data and "
                    "trainer"
                )
        self.threads = threads
        self._jobs = Path("jobs")
        self._started: list[subprocess.Popen[bytes]] = []

    def open(self, directory: Path) -> None:
        self._jobs = directory / "jobs"

    async def create(self, request: JobRequest) -> str:
        job = self._jobs / request.key
        if not job.exists():
            partial = self._jobs / f"{request.key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_whole(partial / _ROWS, as_lines(request.training.local_rows()))
            config = json.dumps(self._config(request, job), indent=1)  # JSON is YAML
            write_whole(partial / _CONFIG, config)
            partial.rename(job)
            sync_directory(self._jobs)
        self._start_unless_running(job)
        return request.key

    async def report(self, job: str) -> JobReport:
        directory = self._jobs / job
        if not (directory / _CONFIG).is_file():
            return JobReport(JobStatus.FAILED, error=f"{directory} was removed or emptied")
        if (directory / RESULT).exists():
            result = _result(directory / RESULT)
            made = directory / MODEL if result.status is JobStatus.SUCCEEDED else None
            if made is not None and not made.is_dir():
                return JobReport(JobStatus.FAILED, error=f"{made} was removed")
            return JobReport(result.status, None if made is None else str(made), result.error)
        self._start_unless_running(directory)
        begun = (directory / STARTS).exists()
        return JobReport(JobStatus.RUNNING if begun else JobStatus.PENDING)

    async def cancel(self, job: str) -> None:
        directory = self._jobs / job
        if (directory / RESULT).exists() or not (directory / _CONFIG).is_file():
            return
        lock = _lock(directory)
        if lock is None:  # something holds it, so the process is still the job's own
            with suppress(ProcessLookupError, FileNotFoundError, ValueError):  # not written yet
                os.kill(int((directory / PID).read_text()), signal.SIGKILL)
        else:
            os.close(lock)
        job_process.write_result(directory, JobStatus.CANCELLED)

    # ---------------------------------------------------------------- inside

    def _config(self, request: JobRequest, job: Path) -> dict[str, Any]:
        """Return the fit's configuration."""
        training = request.training
        rows = {"class_path": "JSONLPrompts", "init_args": {"path": str(job / _ROWS)}}
        base: dict[str, Any] = {
            "seed_everything": request.seed % 2**32,
            "model": {"class_path": training.module, "init_args": {"model": request.model}},
            "data": {"class_path": training.data, "init_args": {"train": rows}},
            "trainer": {
                "max_epochs": 1,
                "devices": 1,
                "default_root_dir": str(job / "fit"),
                "enable_checkpointing": False,
                "enable_model_summary": False,
                "enable_progress_bar": False,
                "logger": False,
            },
        }
        config = _merged(base, self.settings[training.method])
        # Merged: the next stage begins with it, and engines load it.
        options = {"directory": str(job / PARTIAL), "merge_adapters": True}
        export = {"class_path": "HFExport", "init_args": options}
        callbacks = config["trainer"].get("callbacks") or []
        config["trainer"]["callbacks"] = [*callbacks, export]
        return config

    def _start_unless_running(self, job: Path) -> None:
        """Start the job's process, unless it is running or done."""
        lock = _lock(job)
        if lock is None:
            return
        try:
            if (job / RESULT).exists():
                return
            if (job / MODEL).exists():  # it was killed just before it said so
                job_process.write_result(job, JobStatus.SUCCEEDED)
                return
            if (job / STARTS).exists() and (job / STARTS).stat().st_size >= _MOST_STARTS:
                why = f"its process ended {_MOST_STARTS} times too early; see {job / LOG}"
                job_process.write_result(job, JobStatus.FAILED, why)
                return
            shutil.rmtree(job / PARTIAL, ignore_errors=True)
            self._launch(job, lock)
        finally:
            os.close(lock)  # the process has its own by now

    def command(self, job: Path) -> list[str]:
        """Return the command that the job's process runs."""
        return [sys.executable, "-m", "lightning_rl", "fit", "--config", str(job / _CONFIG)]

    def _launch(self, job: Path, lock: int) -> None:
        threads = {"OMP_NUM_THREADS": str(self.threads), "LIGHTNING_RL_JOB_LOCK": str(lock)}
        process = subprocess.Popen(
            [sys.executable, job_process.__file__, str(job), *self.command(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | threads,
            pass_fds=[lock],
            start_new_session=True,  # out of reach of what ends its parent
        )
        self._started = [p for p in self._started if p.poll() is None] + [process]


@dataclass(frozen=True)
class _Result:
    status: JobStatus
    error: str = ""


def _result(path: Path) -> _Result:
    try:
        return parsed(_Result, path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} does not hold a job's result ({one_line(error)}); remove it, and the job runs "
            "again if its model is missing"
        ) from error


def _lock(job: Path) -> int | None:
    """Take the job's lock and return its descriptor; None if a process of the job holds it.

    The lock belongs to the open file, so a process that inherits the descriptor holds it, too.
    """
    descriptor = os.open(job / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings at any depth; where a value is not a mapping, that of ``over`` wins."""
    merged = dict(base)
    for name, value in over.items():
        own = merged.get(name)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(own, value) if both else value  # type: ignore[arg-type]
    return merged
