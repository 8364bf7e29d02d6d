"""Checkpoint files: damage is found, the newest good one is taken, and a full disk hurts none."""

import os
import resource
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.callbacks import IterationCheckpoint
from lightning_rl.errors import CheckpointError, ConfigError
from lightning_rl.run.files.checkpoint_io import (
    VerifiedCheckpointIO,
    damage,
    newest_good,
    write_checkpoint,
)
from lightning_rl.run.loop.interrupts import seconds_of
from tests.support.small_run import trainer_of


@pytest.fixture
def path(tmp_path) -> Path:
    for number in (1, 2):
        state = {"weights": torch.full((1000,), float(number)), "names": ["a", 1, None]}
        write_checkpoint(state, tmp_path / f"iteration_{number}.ckpt")
        os.utime(tmp_path / f"iteration_{number}.ckpt", (number, number))
    return tmp_path / "iteration_2.ckpt"


def test_torch_loads_it(path):
    state = torch.load(path, weights_only=True)
    assert torch.equal(state["weights"], torch.full((1000,), 2.0))
    assert damage(path) is None
    assert newest_good(path.parent) == path


@pytest.mark.parametrize("place", ["first", "middle", "last of torch's", "length", "checksum"])
def test_a_flipped_byte_is_found(path, place):
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
def test_a_file_cut_short_is_found(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    # Without exactly its comment it could be anybody's; -84 leaves torch's archive, whole but
    # for the length of a comment that is missing.
    assert damage(path) is not None


def test_none_left_is_a_named_error(path):
    for number in (1, 2):
        file = path.with_name(f"iteration_{number}.ckpt")
        file.write_bytes(b"")
        os.utime(file, (number, number))
    with pytest.raises(CheckpointError, match=r"_2.ckpt is damaged.*_1.ckpt is damaged.*new run"):
        newest_good(path.parent)


def test_a_checkpoint_of_others_is_loaded_as_it_is(tmp_path):
    torch.save({"x": 1}, tmp_path / "plain.ckpt")
    assert VerifiedCheckpointIO().load_checkpoint(tmp_path / "plain.ckpt") == {"x": 1}


def test_a_full_disk_leaves_what_was_there(path):
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


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("text", ["3:30", "1", "00:00:60", "a:00:00:00"])
def test_a_deadline_in_another_format_is_refused(text):
    with pytest.raises(ConfigError, match="must be DD:HH:MM:SS"):
        IterationCheckpoint(max_time=text)


def test_seconds_of_a_deadline():
    assert seconds_of("01:02:03:04") == 86400 + 2 * 3600 + 3 * 60 + 4


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
