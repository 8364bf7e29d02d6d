"""A run goes on exactly where it was: after every iteration, after signals, after damage."""

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
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl.agents.base import SingleTurn
from lightning_rl.algos.advantages import GAE
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.schedules import AdaptiveCoefficient
from lightning_rl.callbacks import (
    Evaluate,
    IterationCheckpoint,
    PreviewTable,
    RLCallback,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.errors import CheckpointError, ConfigError, RunInterrupted
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.reference import PeriodicReference
from lightning_rl.module import PolicyModule
from lightning_rl.run.checkpoint_io import (
    VerifiedCheckpointIO,
    checkpoints_in,
    damage,
    newest_good,
    write_checkpoint,
)
from lightning_rl.run.interrupts import seconds_of
from tests.support.lots import LotEngine
from tests.support.small_run import adamw, data_module, trainer_of

ITERATIONS = 4  # two epochs of two
GROUPS, GROUP_SIZE = 2, 4


class Dice(RLCallback):
    """Draws on every global generator, as a user's callback might."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        drawn = torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002
        pl_module.record({"dice": drawn})


def fit(tiny_model, tmp_path, *extra, ckpt_path="last", saver=None, **data) -> PolicyModule:
    """A short run with all that has a state: critic, reference, coefficient, schedule, Adam."""
    module = PolicyModule(
        str(tiny_model),
        advantage=GAE(),
        value_head=SharedValueHead(detach=True),
        kl=K3Penalty(AdaptiveCoefficient(0.1, target=1e-4)),
        reference=PeriodicReference(every_n_iterations=2),
        optimizer=adamw(1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ppo_epochs=2,
        minibatches=2,
        seed=7,
    )
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
        "eval_limit": 2, "eval_samples": 1,
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
    """Lines of a file without what differs from run to run, at any depth: times."""
    lines = (directory / file).read_text().splitlines()
    but += ("time/", "cpu_s", "sync/seconds", "rollout/tokens_per_s")

    def kept(found: dict) -> dict:
        return {k: v for k, v in found.items() if not k.startswith(but)}

    return [json.loads(line, object_hook=kept) for line in lines]


def assert_equal(ours, theirs, where="") -> None:
    """Nested states are the same, tensors by torch.equal."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, its, f"{where}/{index}")
    else:
        assert ours == theirs, where


def assert_same_run(directory: Path, whole: Path, batched_alike: bool = True) -> None:
    """Everything that a run leaves behind is what the uninterrupted one left.

    The last bits of an engine's logprobs depend on what it generates at the same time.
    """
    but = () if batched_alike else ("logprobs", "rollout/logprob_gap", "sync/probe_gap")
    name = f"checkpoints/iteration_{ITERATIONS}.ckpt"
    ours, theirs = (torch.load(d / name, weights_only=True) for d in (directory, whole))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "RLDataModule"):
        assert_equal(ours[part], theirs[part], part)
    for part in ("iteration", "parts", "random"):
        assert_equal(ours["lightning_rl"][part], theirs["lightning_rl"][part], part)
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        assert_equal(rows(directory, file, but), rows(whole, file, but), file)
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


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_a_killed_run_goes_on_from_any_iteration(tiny_model, tmp_path, whole, done):
    # What a kill after this checkpoint leaves: later rows and rollouts too, the last cut in two.
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
# tests/integration/test_resume.py tries more places.
@pytest.mark.parametrize(
    ("after", "done", "number", "status"),
    [(2 + 8 + 5, 1, signal.SIGUSR1, 138), (2 + 16 + 1, 2, signal.SIGTERM, 143)],
)
def test_a_signal_while_collecting_saves_at_once_and_loses_nothing(
    tiny_model, tmp_path, whole, after, done, number, status
):
    agent = SignalWhileCollecting(after, number)
    with pytest.raises(RunInterrupted) as stopped:
        fit(tiny_model, tmp_path, agent=agent, saver=IterationCheckpoint(100))
    path = version(tmp_path) / "checkpoints" / f"iteration_{done}.ckpt"
    assert stopped.value.status == status
    assert str(stopped.value) == f"{number.name}; saved {path}; go on with --ckpt_path last"
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


@pytest.mark.parametrize("iteration", [1])
def test_a_signal_in_an_update_stops_after_the_iteration(tiny_model, tmp_path, whole, iteration):
    with pytest.raises(RunInterrupted, match=rf"SIGTERM; saved .*iteration_{iteration + 1}.ckpt"):
        fit(tiny_model, tmp_path, SignalInUpdate(iteration, signal.SIGTERM))
    fit(tiny_model, tmp_path)
    assert_same_run(version(tmp_path), whole)


def test_a_deadline_stops_the_run_as_timeout_does(tiny_model, tmp_path):
    with pytest.raises(RunInterrupted, match="max_time is over") as stopped:
        fit(tiny_model, tmp_path, saver=IterationCheckpoint(max_time="00:00:00:00"))
    assert stopped.value.status == 124


@pytest.mark.parametrize("text", ["3:30", "1", "00:00:60", "a:00:00:00"])
def test_a_deadline_in_another_format_is_refused(text):
    with pytest.raises(ConfigError, match="must be DD:HH:MM:SS"):
        IterationCheckpoint(max_time=text)


def test_seconds_of_a_deadline():
    assert seconds_of("01:02:03:04") == 86400 + 2 * 3600 + 3 * 60 + 4


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


def test_csv_of_an_earlier_start_is_kept(tmp_path):
    logger = CSVLogger(tmp_path, "csv")
    trainer = trainer_of(tmp_path, [saver := IterationCheckpoint()], logger=logger,
                         enable_checkpointing=True)  # fmt: skip
    run = tmp_path / "csv" / "version_3"
    write_checkpoint({"x": 1}, run / "checkpoints" / "iteration_1.ckpt")
    (tmp_path / "csv" / "version_4").mkdir()  # a start that got nowhere
    (run / "metrics.csv").write_text("step\n1\n")
    assert saver._find_last_checkpoints(trainer) == {str(run / "checkpoints/iteration_1.ckpt")}
    assert Path(trainer.log_dir) == run
    assert (run / "metrics_before_1.csv").read_text() == "step\n1\n"


def test_ctrl_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="keep_last=0 must be >= 1"):
        IterationCheckpoint(keep_last=0)
    with pytest.raises(ConfigError, match="mode='best' must be"):
        IterationCheckpoint(monitor="eval/accuracy", mode="best")


class TestFiles:
    """Checkpoint files by themselves."""

    @pytest.fixture
    def path(self, tmp_path) -> Path:
        for number in (1, 2):
            state = {"weights": torch.full((1000,), float(number)), "names": ["a", 1, None]}
            write_checkpoint(state, tmp_path / f"iteration_{number}.ckpt")
            os.utime(tmp_path / f"iteration_{number}.ckpt", (number, number))
        return tmp_path / "iteration_2.ckpt"

    def test_torch_loads_it(self, path):
        state = torch.load(path, weights_only=True)
        assert torch.equal(state["weights"], torch.full((1000,), 2.0))
        assert damage(path) is None
        assert newest_good(path.parent) == path

    @pytest.mark.parametrize("place", ["first", "middle", "last of torch's", "length", "checksum"])
    def test_a_flipped_byte_is_found(self, path, place):
        data = bytearray(path.read_bytes())
        index = {
            "first": 0, "middle": len(data) // 2, "last of torch's": -87, "length": -85,
            "checksum": -1,
        }[place]  # fmt: skip
        data[index] ^= 1
        path.write_bytes(data)
        assert damage(path) is not None
        with pytest.warns(UserWarning, match=r"iteration_2.ckpt is damaged.*before: .*_1.ckpt"):
            assert newest_good(path.parent) == path.with_name("iteration_1.ckpt")
        with pytest.raises(CheckpointError, match=r"_2.ckpt is damaged: .*use .*iteration_1.ckpt"):
            VerifiedCheckpointIO().load_checkpoint(path)

    @pytest.mark.parametrize("kept", [0, 1, 1000, -84, -1])
    def test_a_file_cut_short_is_found(self, path, kept):
        path.write_bytes(path.read_bytes()[:kept])
        # Without exactly its comment it could be anybody's; -84 leaves torch's archive, whole but
        # for the length of a comment that is missing.
        assert damage(path) is not None

    def test_none_left_is_a_named_error(self, path):
        for number in (1, 2):
            file = path.with_name(f"iteration_{number}.ckpt")
            file.write_bytes(b"")
            os.utime(file, (number, number))
        with pytest.raises(CheckpointError, match=r"_2.ckpt is damaged.*_1.ckpt is damaged.*anew"):
            newest_good(path.parent)

    def test_a_checkpoint_of_others_is_loaded_as_it_is(self, tmp_path):
        torch.save({"x": 1}, tmp_path / "plain.ckpt")
        assert VerifiedCheckpointIO().load_checkpoint(tmp_path / "plain.ckpt") == {"x": 1}

    def test_a_full_disk_leaves_what_was_there(self, path):
        """The process may write 64 KiB per file, as if the disk had no more."""
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"_2.ckpt could not be written: File too la"):
                write_checkpoint({"weights": torch.zeros(100_000)}, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert sorted(p.name for p in path.parent.iterdir()) == [
            "iteration_1.ckpt", "iteration_2.ckpt",
        ]  # fmt: skip
