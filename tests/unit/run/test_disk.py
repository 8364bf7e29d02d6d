"""Test that a full disk, a kill or a stray hand leaves files that a run can go on with."""

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.data.rollouts.log import Outcome, RerunLog
from lightning_rl.errors import ConfigError, DiskError
from lightning_rl.run.files.metrics import MetricsLog
from lightning_rl.run.files.rundir import append, require_writable, write_whole
from tests.support.small_run import data_module, grpo, trainer_of


@contextmanager
def room(size: int):
    """Forbid files beyond so many bytes, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    file = tmp_path / "log"
    assert append(file, "12345\n") == 6
    with room(10), pytest.raises(DiskError, match=r"log could not be written: File too large"):
        append(file, "67890\n")
    assert file.read_text() == "12345\n"
    assert append(file, "6\ud800\n") == 14
    assert file.read_text() == "12345\n6\\ud800\n"  # as JSON writes it


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "summary.json"
    write_whole(file, "{}")
    with room(10), pytest.raises(DiskError, match=r"summary\.json could not be written"):
        write_whole(file, "x" * 20)
    assert file.read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def log_in(directory, state=None, checkpoint=None) -> tuple[MetricsLog, Trainer]:
    """Make a log as RunReport keeps it; with ``state``, of a run that goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    trainer = trainer_of(directory, [], logger=CSVLogger(directory.parent, "", directory.name))
    log = MetricsLog()
    log.begin(trainer)
    if state is not None:
        trainer.ckpt_path = checkpoint or directory / "checkpoints" / "iteration_2.ckpt"
        log.load_state_dict(json.loads(json.dumps(state)))
        log.go_on(trainer)
    return log, trainer


def row(iteration: int, **metrics: float) -> dict[str, float]:
    return {"iteration": iteration, "loss": 0.1 * iteration} | metrics


@pytest.fixture
def run(tmp_path):
    """Run four rows, after another run's; return the state after the third."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(json.dumps(row(77)) + "\n")
    log, trainer = log_in(directory)
    for iteration in range(3):
        log.add(trainer, row(iteration))
    state = log.state_dict()
    log.add(trainer, row(3, lost=1.0))
    return directory, state


def lines(directory) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_holds_the_place_of_the_rows_and_not_the_rows(run):
    directory, state = run
    assert all(isinstance(value, int | str) for value in state.values())
    log, trainer = log_in(directory, state)
    assert log.rows == [row(0), row(1), row(2)]
    log.add(trainer, row(3))
    assert lines(directory) == [row(77), row(0), row(1), row(2), row(3)]
    again, _ = log_in(directory, log.state_dict())
    assert again.rows == log.rows


def test_half_a_line_of_a_killed_run_goes(run):
    directory, state = run
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')
    log, trainer = log_in(directory, state)
    log.add(trainer, row(3))
    assert lines(directory)[-2:] == [row(2), row(3)]


def test_a_run_in_another_directory_begins_with_the_rows_before(run, tmp_path):
    directory, state = run
    for place in (directory, tmp_path / "moved"):  # beside the checkpoint, or where they were
        checkpoint = place / "checkpoints" / "iteration_2.ckpt"
        log, _ = log_in(tmp_path / f"new{place.name}", state, checkpoint)
        assert log.rows == [row(0), row(1), row(2)]
        assert lines(tmp_path / f"new{place.name}") == log.rows
    assert lines(directory)[-1] == row(3, lost=1.0)  # which stays as it is


def test_rows_that_were_changed_or_lost_are_told(run, tmp_path):
    directory, state = run
    file = directory / "metrics.jsonl"
    file.write_text(json.dumps(row(0)) + "\nrubbish\n" + json.dumps(row(3)) + "\n")
    with pytest.warns(UserWarning, match="has changed since.*the 1 rows of metrics"):
        log, _ = log_in(directory, state)
    assert log.rows == lines(directory) == [row(0)]
    file.unlink()
    with pytest.warns(UserWarning, match="the 0 rows"):
        log_in(tmp_path / "new", state)


def test_a_damaged_line_of_the_rerun_log_is_named_and_left_out(tmp_path):
    log = RerunLog(tmp_path)
    log.write_outcome(Outcome(1, {"w": "1"}))
    with (tmp_path / "rerun" / "versions.jsonl").open("ab") as file:
        file.write(b'\xff\x00 rubbish\n[1]\n{"version": 2, "nothing": 1}\n')
    log.write_outcome(Outcome(2, {"w": "2"}))
    with pytest.warns(UserWarning, match=r"versions\.jsonl:[234] is damaged and ignored"):
        assert [outcome.weights for outcome in log.outcomes().values()] == [{"w": "1"}, {"w": "2"}]
    with pytest.warns(UserWarning, match="is damaged"):
        log.forget_after(1)
    assert list(log.outcomes()) == [1]


def test_a_file_where_the_runs_should_go_is_told_before_anything_begins(tiny_model, tmp_path):
    (tmp_path / "runs").write_text("")
    for logger, root, key in (
        (CSVLogger(tmp_path / "runs"), tmp_path, r"trainer\.logger\.save_dir"),
        (False, tmp_path / "runs" / "below", r"trainer\.default_root_dir"),
    ):
        trainer = trainer_of(root, [], logger=logger)
        with pytest.raises(ConfigError, match=rf"{key}: .*runs is a file, but must be a directory"):
            trainer.fit(grpo(tiny_model), data_module())


@pytest.mark.parametrize("root", ["memory://runs", "file:///tmp/runs"])
def test_a_url_where_the_runs_should_go_is_refused(tiny_model, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(root, [], logger=False)
    with pytest.raises(ConfigError, match=r"default_root_dir='\w+:/+\w.*is a URL.*choose a local"):
        trainer.fit(grpo(tiny_model), data_module())
    assert not list(tmp_path.iterdir())


def test_lightnings_checkpoints_may_be_kept_at_a_url_and_resumed(tiny_model, tmp_path):
    place = "memory://test_disk"  # as s3:// with s3fs
    saving = [ModelCheckpoint(dirpath=place, save_last=True)]
    data = {"iterations_per_epoch": 1}
    trainer = trainer_of(tmp_path, saving, logger=False, enable_checkpointing=True)
    trainer.fit(grpo(tiny_model), data_module(**data))
    trainer = trainer_of(tmp_path, logger=False, max_epochs=2)
    trainer.fit(grpo(tiny_model), data_module(**data), ckpt_path=f"{place}/last.ckpt")
    assert trainer.global_step == 2
    fsspec.filesystem("memory").rm("/test_disk", recursive=True)


def test_a_directory_that_cannot_be_written_is_told():
    with TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:  # with the rights of nobody: root may write anywhere
            try:
                if os.geteuid() == 0:
                    os.setuid(65534)
                require_writable(Path(place, "new"), "save_dir")
            except ConfigError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as said:
            assert f"save_dir: {place} cannot be written (it is read-only" in said.read()
