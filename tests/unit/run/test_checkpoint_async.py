"""Test checkpoints in the background: what is copied, where it waits, and who hashes it."""

import hashlib
import threading

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO

from lightning_rl.run import host_memory
from lightning_rl.run.files import checkpoint_io
from lightning_rl.run.files.checkpoint_io import (
    BackgroundCheckpointIO,
    VerifiedCheckpointIO,
    damage,
)
from lightning_rl.run.processes.dist import fell_back


class Held(VerifiedCheckpointIO):
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        assert self.go.wait(60)
        self.checkpoint = checkpoint
        super().save_checkpoint(checkpoint, path, storage_options)


def test_what_is_written_is_what_was_when_it_was_saved(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    tied = {"embed": weight, "head": weight, "row": weight[1], "step": 3}
    writer = Held()
    background = BackgroundCheckpointIO(writer)
    background.save_checkpoint({"state_dict": tied}, tmp_path / "a.ckpt")
    weight.zero_()  # training goes on
    writer.go.set()
    background.teardown()
    copied = writer.checkpoint["state_dict"]
    assert copied["head"] is copied["embed"]  # one copy, and once in the file
    assert damage(tmp_path / "a.ckpt") is None
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert loaded["head"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["row"].tolist() == [3, 4, 5]
    assert loaded["step"] == 3


class Broken(CheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        raise OSError("no space")

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        raise NotImplementedError

    def remove_checkpoint(self, path) -> None:
        raise NotImplementedError


def test_what_fails_in_the_background_is_raised_at_the_end(tmp_path):
    background = BackgroundCheckpointIO(Broken())
    background.save_checkpoint({}, tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="no space"):
        background.teardown()


class OnCUDA:
    """A tensor on a GPU, as far as it is looked at."""

    device = torch.device("cuda")

    def cpu(self):
        return "waited for"


def test_from_a_gpu_through_pinned_memory_or_else_waited_for(monkeypatch, caplog):
    asked = []

    def empty_like(tensor, **options):
        asked.append(options)
        if len(asked) == 2:
            raise RuntimeError("cannot pin\nthe stack")
        return Pinned()

    class Pinned:
        def copy_(self, tensor, non_blocking):
            assert non_blocking
            return "on its way"

    monkeypatch.setattr(host_memory.torch, "empty_like", empty_like)
    fell_back.cache_clear()
    assert host_memory._host_copy(OnCUDA()) == "on its way"
    assert host_memory._host_copy(OnCUDA()) == "waited for"
    assert asked == 2 * [{"device": "cpu", "pin_memory": True}]
    assert "pinned host memory cannot be used: cannot pin;" in caplog.text


def test_a_checksum_is_made_while_the_file_is_written(monkeypatch, tmp_path):
    threads = set()
    sha256 = hashlib.sha256

    class Noted:
        def __init__(self) -> None:
            self.real = sha256()
            self.hexdigest = self.real.hexdigest

        def update(self, data) -> None:
            threads.add(threading.get_ident())
            self.real.update(data)

    monkeypatch.setattr(checkpoint_io.hashlib, "sha256", Noted)
    checkpoint_io.write_checkpoint({"a": torch.rand(1000)}, tmp_path / "a.ckpt")
    monkeypatch.undo()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert damage(tmp_path / "a.ckpt") is None
