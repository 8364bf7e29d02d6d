"""A run is stopped by signals, failures, full disks and damage, and goes on exactly where it was.

The run has all that has a state; tests/integration/test_resume.py resumes other kinds.
"""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.kill.compare import differences
from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks import (
    Evaluate,
    IterationCheckpoint,
    PreviewTable,
    RLCallback,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.errors import CheckpointError, DiskError, RewardError, RunInterrupted
from lightning_rl.module import PolicyModule
from lightning_rl.run.files.checkpoint_io import checkpoints_in, damage, newest_good
from lightning_rl.run.files.rundir import run_dir
from tests.support.engine_checks import wait_for
from tests.support.lots import LotEngine
from tests.support.resumed import is_time, state_of
from tests.support.resumed_cases import everything
from tests.support.small_run import data_module, share_of_sevens, trainer_of
from tests.support.tiers import slow

ITERATIONS = 4  # two epochs of two
GROUPS, GROUP_SIZE = 2, 4


class Dice(RLCallback):
    """Draws on every global generator, as a user's callback might."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        drawn = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002
        pl_module.record({"dice": drawn})


def fit(tiny_model, tmp_path, *extra, ckpt_path="last", saver=None, **data) -> PolicyModule:
    """Fit shortly with all that has a state: critic, reference, coefficient, schedule, Adam."""
    module = everything(str(tiny_model))
    module.allow_changes = True  # of agents that stop the run, say
    callbacks = [
        WeightSync(), Evaluate(every_n_iterations=2), PreviewTable(num_rollouts=100), RunReport(),
        StepTimer(), Dice(), *extra, saver or IterationCheckpoint(1, keep_last=ITERATIONS),
    ]  # fmt: skip
    trainer = trainer_of(
        tmp_path,
        callbacks,
        max_epochs=2,
        enable_checkpointing=True,
        logger=TensorBoardLogger(tmp_path, "tb"),
    )
    options = {
        "groups_per_iteration": GROUPS, "group_size": GROUP_SIZE, "iterations_per_epoch": 2,
        "evaluation": {"limit": 2, "samples": 1},
        # What is left of a batch is written in another one.
        "engine": LotEngine(device="cpu"),
    }  # fmt: skip
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    trainer.fit(module, data_module(**(options | data)), ckpt_path=ckpt_path)
    return module


def version(tmp_path, number=0) -> Path:
    return tmp_path / "tb" / f"version_{number}"


def rows(directory: Path, file: str = "metrics.jsonl", but: tuple[str, ...] = ()) -> list[dict]:
    """Return lines of a file without times and some other columns, at any depth.

    The row of an iteration after which a signal stopped the run has no times.
    """

    def kept(found: dict) -> dict:
        return {k: v for k, v in found.items() if not (is_time(k) or k.startswith(but))}

    lines = (directory / file).read_text().splitlines()
    return [json.loads(line, object_hook=kept) for line in lines]


def assert_same_run(directory: Path, whole: Path, batched_alike: bool = True) -> None:
    """Require that everything that a run leaves behind is what the uninterrupted one left.

    The last bits of an engine's logprobs depend on what it generates at the same time.
    """
    but = () if batched_alike else ("logprobs", "rollout/logprob_gap", "sync/probe_gap")
    name = f"checkpoints/iteration_{ITERATIONS}.ckpt"
    assert differences(state_of(directory / name), state_of(whole / name), "state") == []
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        assert differences(rows(directory, file, but), rows(whole, file, but), file) == []
    assert [row["iteration"] for row in rows(directory)] == list(range(ITERATIONS + 1))
    assert len(rows(directory, "rollouts.jsonl")) == ITERATIONS * GROUPS * GROUP_SIZE
    assert [p.name for p in directory.parent.iterdir()] == ["version_0"]  # one run, one directory


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    """Takes a third of such a short run, and is tested elsewhere."""
    monkeypatch.setattr("lightning_rl.callbacks.report.plot_curves", lambda *_: None)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    fit(tiny_model, path, ckpt_path=None)
    return version(path)


@pytest.mark.parametrize("done", [1, 4])
def test_a_killed_run_goes_on_from_any_iteration(tiny_model, tmp_path, whole, done):
    # A kill after this checkpoint leaves later rows and rollouts too, the last cut in two.
    directory = version(tmp_path)
    shutil.copytree(whole, directory, symlinks=True)
    for later in range(done + 1, ITERATIONS + 1):
        (directory / "checkpoints" / f"iteration_{later}.ckpt").unlink()
    (directory / "checkpoints" / "iteration_9.ckpt.partial").write_bytes(b"half a checkpo")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "rew')
    module = fit(tiny_model, tmp_path)
    assert module.iteration == ITERATIONS
    assert_same_run(directory, whole)
    assert not list((directory / "checkpoints").glob("*.partial"))


class SignalWhileCollecting(SingleTurn):
    """Sends a signal when some rollouts of a batch are done, and others will never be."""

    def __init__(self, after: int, number: signal.Signals) -> None:
        self.left, self.number = after, number

    async def run(self, rollout, engine, sampling):
        self.left -= 1
        if self.left < 0:
            if self.left == -1:
                asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), self.number)
            await asyncio.sleep(600)
        return await super().run(rollout, engine, sampling)


# Rollouts until the signal: 2 in the first evaluation, 8 in an iteration, 2 more after the second.
@pytest.mark.parametrize(
    ("after", "done", "number", "status"),
    [
        slow(2 + 3, 0, signal.SIGTERM, 143),
        (2 + 8 + 5, 1, signal.SIGUSR1, 138),
        (2 + 16 + 1, 2, signal.SIGTERM, 143),  # in the evaluation at an epoch's end
        slow(2 + 16 + 2 + 4, 2, signal.SIGINT, 130),  # in the first batch of an epoch
        slow(2 + 16 + 2 + 8 + 7, 3, signal.SIGTERM, 143),
    ],
)
def test_a_signal_while_collecting_saves_at_once_and_loses_nothing(
    tiny_model, tmp_path, whole, after, done, number, status
):
    agent = SignalWhileCollecting(after, number)
    with pytest.raises(RunInterrupted) as stopped:
        fit(tiny_model, tmp_path, agent=agent, saver=IterationCheckpoint(100))
    path = version(tmp_path) / "checkpoints" / f"iteration_{done}.ckpt"
    assert stopped.value.status == status
    assert str(stopped.value) == f"{number.name}; saved {path}; resume with --ckpt_path last"
    summary = json.loads((version(tmp_path) / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("interrupted", done)
    assert summary["error"] == f"RunInterrupted: {number.name}"
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole, batched_alike=False)


class SignalInUpdate(RLCallback):
    """Sends signals when an update begins."""

    def __init__(self, iteration: int, *numbers: signal.Signals) -> None:
        self.iteration, self.numbers = iteration, numbers

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == self.iteration:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("iteration", [slow(0), 1, slow(2), slow(3)])
def test_a_signal_in_an_update_stops_after_the_iteration(tiny_model, tmp_path, whole, iteration):
    with pytest.raises(RunInterrupted, match=rf"SIGTERM; saved .*iteration_{iteration + 1}.ckpt"):
        fit(tiny_model, tmp_path, SignalInUpdate(iteration, signal.SIGTERM))
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


def test_a_deadline_stops_the_run_as_timeout_does(tiny_model, tmp_path):
    with pytest.raises(RunInterrupted, match="max_time is reached") as stopped:
        fit(tiny_model, tmp_path, saver=IterationCheckpoint(max_time="00:00:00:00"))
    assert stopped.value.status == 124


def test_the_last_and_the_best_are_kept(tiny_model, tmp_path):
    saver = IterationCheckpoint(1, keep_last=1, monitor="dice", keep_best=2, mode="min")
    fit(tiny_model, tmp_path, ckpt_path=None, saver=saver)
    directory = version(tmp_path) / "checkpoints"
    drawn = {row["dice"]: row["iteration"] for row in rows(version(tmp_path)) if "dice" in row}
    best = [drawn[value] for value in sorted(drawn)[:2]]
    assert {p.name for p in checkpoints_in(directory)} == {
        f"iteration_{i}.ckpt" for i in {*best, ITERATIONS}
    }
    assert os.readlink(directory / "best.ckpt") == f"iteration_{best[0]}.ckpt"
    assert os.readlink(directory / "last.ckpt") == f"iteration_{ITERATIONS}.ckpt"
    assert saver.best_model_path == str(directory / f"iteration_{best[0]}.ckpt")


def test_a_second_ctrl_c_stops_at_once(tiny_model, tmp_path, whole):
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning's answer to a KeyboardInterrupt
            fit(tiny_model, tmp_path, SignalInUpdate(2, signal.SIGINT, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoints_in(version(tmp_path) / "checkpoints")[0].name == "iteration_2.ckpt"
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


def test_signals_are_handled_as_before_when_the_run_is_over(tiny_model, tmp_path):
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(RunInterrupted):
        fit(tiny_model, tmp_path, SignalInUpdate(0, signal.SIGTERM))
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_failed_reward_leaves_the_rollouts_for_the_next_start(tiny_model, tmp_path, whole):
    calls = []

    def broken_once(completions, completion_ids, **columns):
        calls.append(len(completions))
        if len(calls) == 4:  # called per group: the second of the first batch
            raise KeyError("answer")
        return share_of_sevens(completions, completion_ids)

    broken_once.__name__ = "share_of_sevens"
    with pytest.raises(RewardError):
        fit(tiny_model, tmp_path, rewards=[broken_once], saver=IterationCheckpoint(100))
    again = SignalWhileCollecting(1000, signal.SIGTERM)  # counts
    fit(tiny_model, tmp_path, agent=again)
    # Only the failed batch's evaluations and batches, of three of 2 and four of 8, are left out.
    assert 1000 - again.left == 3 * 2 + 3 * 8
    assert_same_run(version(tmp_path), whole)


class FailInUpdate(RLCallback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if pl_module.iteration == 2:
            raise RuntimeError("out of memory")


def test_a_half_done_update_is_not_saved(tiny_model, tmp_path, whole):
    with (
        pytest.warns(UserWarning, match="failed within the update of iteration 3"),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        fit(tiny_model, tmp_path, FailInUpdate())
    assert checkpoints_in(version(tmp_path) / "checkpoints")[0].name == "iteration_2.ckpt"
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


@pytest.mark.slow
def test_an_asynchronous_save_is_waited_for(tiny_model, tmp_path, whole):
    saver = IterationCheckpoint(1, keep_last=ITERATIONS, asynchronous=True)
    with pytest.raises(RunInterrupted):
        fit(tiny_model, tmp_path, SignalInUpdate(2, signal.SIGTERM), saver=saver)
    directory = version(tmp_path) / "checkpoints"
    assert [damage(p) for p in checkpoints_in(directory)] == [None] * 3
    assert os.readlink(directory / "last.ckpt") == "iteration_3.ckpt"
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


class FullDisk(RLCallback):
    """Forbids files to grow beyond 64 KiB from an iteration on."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == 2:
            wait_for(lambda: newest_good(run_dir(trainer) / "checkpoints"))  # of the background
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))


@pytest.mark.parametrize("asynchronous", [False, slow(True)])
def test_a_run_stops_when_the_disk_is_full(tiny_model, tmp_path, whole, asynchronous):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = IterationCheckpoint(1, keep_last=1, asynchronous=asynchronous)
    try:
        with pytest.raises(CheckpointError, match=r"iteration_\d.ckpt could not be written"):
            fit(tiny_model, tmp_path, FullDisk(), saver=saver)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # What is written in the background may not be whole yet when the disk is full.
    good = ("iteration_1.ckpt", "iteration_2.ckpt") if asynchronous else ("iteration_2.ckpt",)
    assert newest_good(version(tmp_path) / "checkpoints").name in good
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


class FullLog(RLCallback):
    """Fills the disk that holds the rows of metrics from an iteration on."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == 2:
            file = run_dir(trainer) / "metrics.jsonl"
            file.rename(file.with_name("metrics"))
            file.symlink_to("/dev/full")


def test_a_full_disk_under_a_log_loses_nothing(tiny_model, tmp_path, whole):
    saver = IterationCheckpoint(100)  # so that all that was done is saved when the log fails
    with pytest.raises(DiskError, match=r"metrics.jsonl could not be written: No space left"):
        fit(tiny_model, tmp_path, FullLog(), saver=saver)
    directory = version(tmp_path)
    assert newest_good(directory / "checkpoints").name == "iteration_3.ckpt"
    (directory / "metrics").rename(directory / "metrics.jsonl")
    fit(tiny_model, tmp_path)
    assert_same_run(directory, whole)


def test_a_run_goes_on_from_before_a_damaged_checkpoint(tiny_model, tmp_path, whole):
    shutil.copytree(whole, version(tmp_path), symlinks=True)
    directory = version(tmp_path) / "checkpoints"
    (directory / f"iteration_{ITERATIONS}.ckpt").unlink()  # it had not got that far
    newest = directory / "iteration_3.ckpt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"iteration_3.ckpt is damaged: .*iteration_2.ckpt"):
        fit(tiny_model, tmp_path / "other", ckpt_path=str(newest))
    with pytest.warns(UserWarning, match=r"iteration_3.ckpt is damaged.*before: .*_2.ckpt"):
        fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)
