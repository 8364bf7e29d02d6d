"""Test LocalJobs: processes that outlive, fail, are killed and cancelled; here they do little."""

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games.staged.jobs import JobReport, JobRequest, JobStatus
from lightning_rl.games.staged.local_jobs import LocalJobs
from lightning_rl.games.staged.training_sets import Demonstrations, Example, Pair, Preferences

ASKED = [{"role": "user", "content": "2 + 2?"}]
ROWS = Demonstrations([Example(ASKED, "4")])
MAKE_MODEL = "import os, sys; os.mkdir(sys.argv[1] + '/model.partial')"


class Quick(LocalJobs):
    """Its processes run a line of Python instead of a fit; the directory is their argument."""

    def __init__(self, code: str, directory: Path, **options) -> None:
        super().__init__(**options)
        self.code = code
        self.open(directory)

    def command(self, job: Path) -> list[str]:
        return [sys.executable, "-c", self.code, str(job)]


def create(jobs: LocalJobs, key: str = "k", training=ROWS) -> str:
    return asyncio.run(jobs.create(JobRequest(key, "base", training, seed=2**33 + 1)))


def report(jobs: LocalJobs, job: str = "k") -> JobReport:
    return asyncio.run(jobs.report(job))


def end_of(jobs: LocalJobs, job: str = "k") -> JobReport:
    deadline = time.monotonic() + 60
    while not (told := report(jobs, job)).status.over:
        assert time.monotonic() < deadline, told
        time.sleep(0.02)
    return told


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path.read_text()


def test_a_job_makes_a_model(tmp_path):
    jobs = Quick(MAKE_MODEL, tmp_path)
    assert create(jobs) == "k"
    assert end_of(jobs) == JobReport(JobStatus.SUCCEEDED, str(tmp_path / "jobs/k/model"))
    assert (tmp_path / "jobs/k/model").is_dir()


def test_it_is_a_fit_with_what_was_set(tmp_path):
    settings = {"trainer": {"max_epochs": 3}, "model": {"init_args": {"beta": 0.2}}}
    jobs = Quick(MAKE_MODEL, tmp_path, preference=settings)
    create(jobs, training=Preferences([Pair(ASKED, "4", "5")]))
    config = json.loads((tmp_path / "jobs/k/config.yaml").read_text())
    assert config["seed_everything"] == 1  # of 2^33 + 1, what seed_everything takes
    assert config["model"] == {
        "class_path": "DPOModule", "init_args": {"model": "base", "beta": 0.2}
    }  # fmt: skip
    assert config["trainer"]["max_epochs"] == 3
    [export] = config["trainer"]["callbacks"]
    assert export["init_args"]["directory"].endswith("jobs/k/model.partial")
    [row] = map(json.loads, (tmp_path / "jobs/k/rows.jsonl").read_text().splitlines())
    assert row == {"prompt": ASKED, "chosen": "4", "rejected": "5"}
    end_of(jobs)


def test_why_it_failed_is_told(tmp_path):
    jobs = Quick("print('well'); raise ValueError('no such thing')", tmp_path)
    create(jobs)
    told = end_of(jobs)
    assert told.status is JobStatus.FAILED
    assert told.model is None
    assert told.error.startswith("ended with status 1: ")
    assert told.error.endswith("ValueError: no such thing")


def test_a_fit_that_leaves_no_model_failed(tmp_path):
    jobs = Quick("pass", tmp_path)
    create(jobs)
    assert end_of(jobs) == JobReport(
        JobStatus.FAILED, None, "ended with status 0: it printed nothing"
    )


def test_one_that_is_there_is_not_created_again(tmp_path):
    jobs = Quick(MAKE_MODEL, tmp_path)
    create(jobs)
    done = end_of(jobs)
    rows = (tmp_path / "jobs/k/rows.jsonl").stat().st_mtime_ns
    again = Quick("raise SystemExit('never run')", tmp_path)
    create(again)
    assert report(again) == done
    assert (tmp_path / "jobs/k/rows.jsonl").stat().st_mtime_ns == rows
    assert (tmp_path / "jobs/k/starts").read_text() == "."


def test_what_a_kill_left_of_a_creation_is_made_anew(tmp_path):
    half = tmp_path / "jobs/k.partial"
    half.mkdir(parents=True)
    (half / "rows.jsonl").write_text("half a li")
    jobs = Quick(MAKE_MODEL, tmp_path)
    create(jobs)
    assert end_of(jobs).status is JobStatus.SUCCEEDED
    assert not half.exists()


GATED = (
    "import os, sys, time\n"
    "while not os.path.exists(sys.argv[1] + '/../../gate'): time.sleep(0.01)\n" + MAKE_MODEL
)


def test_it_outlives_who_asked_for_it(tmp_path):
    pid = os.fork()
    if pid == 0:
        create(Quick(GATED, tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    jobs = Quick("raise SystemExit('never run')", tmp_path)
    wait_for(tmp_path / "jobs/k/pid")
    assert report(jobs).status is JobStatus.RUNNING
    (tmp_path / "gate").touch()
    assert end_of(jobs).status is JobStatus.SUCCEEDED
    assert (tmp_path / "jobs/k/starts").read_text() == "."


def test_one_whose_processes_were_killed_is_started_again(tmp_path):
    jobs = Quick(GATED, tmp_path)
    create(jobs)
    wait_for(tmp_path / "jobs/k/starts")
    os.killpg(int(wait_for(tmp_path / "jobs/k/pid")), signal.SIGKILL)
    (tmp_path / "gate").touch()
    assert end_of(jobs).status is JobStatus.SUCCEEDED
    assert (tmp_path / "jobs/k/starts").read_text() == ".."


def test_one_that_was_killed_just_before_it_said_so_is_done(tmp_path):
    jobs = Quick(MAKE_MODEL, tmp_path)
    create(jobs)
    done = end_of(jobs)
    (tmp_path / "jobs/k/result.json").unlink()
    assert end_of(Quick("raise SystemExit('never run')", tmp_path)) == done
    assert (tmp_path / "jobs/k/starts").read_text() == "."


def test_but_not_without_end(tmp_path):
    jobs = Quick("import os; os.killpg(0, 9)", tmp_path)
    create(jobs)
    told = end_of(jobs)
    assert told.status is JobStatus.FAILED
    assert told.error.startswith("its process ended 3 times too early; see")
    assert (tmp_path / "jobs/k/starts").read_text() == "..."


def test_a_command_that_is_killed_alone_failed(tmp_path):
    jobs = Quick("import os; os.kill(os.getpid(), 9)", tmp_path)
    create(jobs)
    assert end_of(jobs).error == "ended with signal 9: it printed nothing"


def test_a_job_is_cancelled_unless_it_is_over(tmp_path):
    jobs = Quick(GATED, tmp_path)
    create(jobs)
    process = int(wait_for(tmp_path / "jobs/k/pid"))
    asyncio.run(jobs.cancel("k"))
    assert report(jobs) == JobReport(JobStatus.CANCELLED)
    assert os.waitpid(process, 0) == (process, signal.SIGKILL)
    create(jobs)  # nor is it started again
    assert report(jobs) == JobReport(JobStatus.CANCELLED)
    quick = Quick(MAKE_MODEL, tmp_path)
    create(quick, "done")
    done = end_of(quick, "done")
    asyncio.run(quick.cancel("done"))
    assert report(quick, "done") == done


def test_a_job_that_is_cancelled_as_it_starts_leaves_nothing_behind(tmp_path):
    jobs = Quick(GATED, tmp_path)
    for number in range(5):  # its process is killed before its keeper has begun to look
        create(jobs, f"k{number}")
        wait_for(tmp_path / f"jobs/k{number}/pid")
        asyncio.run(jobs.cancel(f"k{number}"))
    for number in range(5):
        # The command holds the lock, too.
        descriptor = os.open(tmp_path / f"jobs/k{number}/.lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)


def test_settings_are_keys_of_a_fit():
    with pytest.raises(ConfigError, match=r"\['optimizer'\] are not keys of a fit"):
        LocalJobs(supervised={"optimizer": {}})


def test_what_a_job_left_may_be_damaged(tmp_path):
    jobs = Quick(MAKE_MODEL, tmp_path)
    create(jobs)
    end_of(jobs)
    result = tmp_path / "jobs/k/result.json"
    for text in ("", "{", "[]", '{"status": "odd"}', '{"error": ""}'):
        result.write_text(text)
        with pytest.raises(DataError, match=r"result\.json does not hold a job's result"):
            report(jobs)
    (tmp_path / "jobs/k/model").rmdir()
    result.write_text('{"status": "succeeded", "error": ""}')
    assert report(jobs).error == f"{tmp_path}/jobs/k/model was removed"
    assert report(jobs, "never").error == f"{tmp_path}/jobs/never was removed or emptied"
    asyncio.run(jobs.cancel("never"))
