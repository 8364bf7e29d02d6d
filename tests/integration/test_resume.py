"""More places at which a run is stopped, and goes on exactly; see test_checkpoint.py."""

import os
import resource
import shutil
import signal

import pytest

from lightning_rl.callbacks import IterationCheckpoint, RLCallback
from lightning_rl.errors import CheckpointError, DiskError, RewardError, RunInterrupted
from lightning_rl.run.checkpoint_io import checkpoints_in, damage, newest_good
from lightning_rl.run.rundir import run_dir
from tests.integration.test_checkpoint import (
    ITERATIONS,
    SignalInUpdate,
    SignalWhileCollecting,
    assert_same_run,
    fit,
    version,
    whole as whole,
)
from tests.support.engine_checks import wait_for
from tests.support.small_run import share_of_sevens


@pytest.mark.parametrize(
    ("after", "done", "number"),
    [
        (2 + 3, 0, signal.SIGTERM),
        (2 + 16 + 2 + 4, 2, signal.SIGINT),  # in the first batch of an epoch
        (2 + 16 + 2 + 8 + 7, 3, signal.SIGTERM),
    ],
)
def test_a_signal_while_collecting(tiny_model, tmp_path, whole, after, done, number):
    agent = SignalWhileCollecting(after, number)
    with pytest.raises(RunInterrupted, match=rf"{number.name}; saved .*iteration_{done}.ckpt"):
        fit(tiny_model, tmp_path, agent=agent, saver=IterationCheckpoint(100))
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole, batched_alike=False)


@pytest.mark.parametrize("iteration", [0, 2, 3])
def test_a_signal_in_an_update(tiny_model, tmp_path, whole, iteration):
    with pytest.raises(RunInterrupted, match=rf"SIGTERM; saved .*iteration_{iteration + 1}.ckpt"):
        fit(tiny_model, tmp_path, SignalInUpdate(iteration, signal.SIGTERM))
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


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
    # Of three evaluations of 2 and four batches of 8, only those of the failed batch are left out.
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
    """From an iteration on, no file may grow beyond 64 KiB."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == 2:
            wait_for(lambda: newest_good(run_dir(trainer) / "checkpoints"))  # of the background
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))


@pytest.mark.parametrize("asynchronous", [False, True])
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
    """From an iteration on, the disk with the rows of metrics takes no more."""

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
