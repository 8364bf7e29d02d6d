"""Checkpoint files that are written atomically and checked for damage when they are loaded."""

import hashlib
import os
import re
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.errors import CheckpointError
from lightning_rl.run.files.checkpoint_folders import damage_of_folder, unwritten
from lightning_rl.run.files.rundir import sync_directory
from lightning_rl.run.host_memory import in_host_memory

# torch.save writes a zip archive, and a zip archive may end with a comment: so the checksum travels
# with the file, and torch.load reads it like any other checkpoint.
_COMMENT = re.compile(rb"lightning_rl sha256 ([0-9a-f]{64})")
_COMMENT_SIZE = len(b"lightning_rl sha256 ") + 64
_BLOCK = 1 << 20


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written atomically, with a checksum that loading verifies.

    A file appears under its name only when all of it is on disk, so a kill or a full disk leaves
    the previous file intact. Files without a checksum, written by other tools, are loaded as they
    are; remote paths (``s3://...``) are left to Lightning.

    Raises:
        CheckpointError: if a file cannot be written, or is damaged.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if _is_remote(path):
            try:
                return super().load_checkpoint(path, *args, **kwargs)
            except Exception as error:  # whatever the client of a service raises
                raise CheckpointError(
                    f"{path} cannot be loaded ({type(error).__name__}: {error}); download it, and "
                    "pass the local file instead"
                ) from error
        if Path(path).is_dir():
            raise CheckpointError(
                f"{path} is a folder of shards, which only ModelParallelStrategy can read; set "
                "trainer.strategy to it, with data_parallel_size set to the number of processes (1 "
                "is enough) and tensor_parallel_size: 1"
            )
        require_good(Path(path))
        return super().load_checkpoint(path, *args, **kwargs)


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its checksum; ``path`` changes only when all of it is on disk.

    Raises:
        CheckpointError: if the disk is full, or the file cannot be written for another reason.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file, ThreadPoolExecutor(1) as hasher:
            hashing = _HashingFile(file, hasher)
            torch.save(checkpoint, hashing)  # type: ignore[arg-type]
            if hashing.error is not None:
                raise hashing.error
            _append_comment(file, hashing.digest.hexdigest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritten(path, error.strerror or error) from error


def written_digest(path: Path) -> str | None:
    """Return the SHA-256 that a checkpoint file records for itself; None if it has none."""
    if path.is_dir():
        return None
    found = _COMMENT.fullmatch(_tail(path))
    return None if found is None else found[1].decode()


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _COMMENT_SIZE))
        return file.read()


def damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is intact, or has no checksum.

    A file without a checksum was not written by this library; only its end is checked to be that of
    a torch file.
    """
    if path.is_dir():
        return damage_of_folder(path)
    tail = _tail(path)
    written = written_digest(path)
    if written is None:
        # How an archive without a comment ends: with a record of 22 bytes.
        whole = tail[-22:-18] == b"PK\x05\x06" and tail[-2:] == b"\0\0"
        return None if whole else "it is truncated, or not a checkpoint"
    with path.open("rb") as file:
        digest = hashlib.sha256()
        left = path.stat().st_size - _COMMENT_SIZE - 2
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
        length = int.from_bytes(file.read(2), "little")
    digest.update(b"\0\0")  # what torch wrote for the comment's length
    if length == _COMMENT_SIZE and digest.hexdigest() == written:
        return None
    return "its content has changed since it was written (the sha256 differs)"


def require_good(path: Path) -> None:
    """Check a file's checksum, or the file sizes of a folder of shards.

    Raises:
        CheckpointError: if the checkpoint is damaged; names the newest intact one beside it.
    """
    if not path.exists():  # which Lightning reports
        return
    what = damage(path)
    if what is None:
        return
    good = next((p for p in checkpoints_in(path.parent) if damage(p) is None), None)
    fix = f"use {good}" if good else "no intact one is beside it; use another, or start a new run"
    raise CheckpointError(f"{path} is damaged: {what}; {fix}")


def newest_good(directory: Path, run_id: str | None = None) -> Path | None:
    """Return the checkpoint of the highest iteration that is intact; warn of damaged ones.

    Args:
        directory: the folder of checkpoints.
        run_id: only checkpoints of this run, or without an id, are considered. None: of any run.

    Raises:
        CheckpointError: if there are checkpoints, but all are damaged or of another run.
    """
    bad: list[str] = []
    for path in checkpoints_in(directory):
        what = damage(path)
        if what is None and run_id is not None and run_of(path) not in (None, run_id):
            bad.append(f"{path} belongs to another run and is skipped")
        elif what is not None:
            bad.append(f"{path} is damaged: {what}")
        else:
            if bad:
                rank_zero_warn(f"{'; '.join(bad)}. Resuming from the one before: {path}")
            return path
    if bad:
        raise CheckpointError(
            f"{'; '.join(bad)}. No other checkpoint is in {directory}; start a new run (without "
            "--ckpt_path), or pass the path of a checkpoint elsewhere"
        )
    return None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return all checkpoints of a folder, highest iteration first, without symbolic links.

    They are not ordered by modification time: copying a run changes that.
    """
    files = [path for path in directory.glob("*.ckpt") if not path.is_symlink()]
    return sorted(files, key=lambda p: (iteration_of(p), p.stat().st_mtime_ns), reverse=True)


def iteration_of(path: Path) -> int:
    """Return the iteration after which a checkpoint was saved, by its name or else its content; or
    -1.
    """
    named = re.fullmatch(r"iteration_(\d+)\.ckpt", path.name)
    return int(named[1]) if named else int(about(path).get("iteration", -1))


def run_of(path: Path) -> str | None:
    """Return the id of the run that a checkpoint belongs to; None if it records none."""
    run = about(path).get("run")
    return None if run is None else run["id"]


def about(path: Path) -> dict[str, Any]:
    """Read this library's metadata in a checkpoint, without its weights; empty if there is none."""
    file = path / "meta.pt" if path.is_dir() else path  # shards keep all but weights there
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        entry: dict[str, Any] = checkpoint["lightning_rl"]
    except Exception:
        return {}
    return entry


class _HashingFile:
    """A file that is hashed in a thread while it is written; both release the GIL."""

    def __init__(self, file: BinaryIO, hasher: Executor) -> None:
        self._file = file
        self._hasher = hasher
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        # torch's writer is C++ and ends the process if this raises while it tidies up.
        if self.error is None:
            hashed = self._hasher.submit(self.digest.update, data)
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            hashed.result()  # the memory of the data is the writer's again
        return len(data)

    def flush(self) -> None:
        pass


def _append_comment(file: BinaryIO, digest: str) -> None:
    """Append a comment to a zip archive, which ends with the comment length 0."""
    comment = f"lightning_rl sha256 {digest}".encode()
    file.seek(-2, os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


class BackgroundCheckpointIO(AsyncCheckpointIO):
    """Lightning's asynchronous writer, except that a checkpoint waits in host memory.

    A copy of weights and optimizer state on a GPU would need three times the weights' memory there
    while training continues. Training waits only for the copy to the host; serialising, hashing and
    writing happen in the writer's thread.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if self._error:  # of a save before this one
            raise self._error
        self._ensure_setup()
        assert self._executor is not None
        self._executor.submit(self._write, in_host_memory(checkpoint), path, storage_options)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        assert self.checkpoint_io is not None
        try:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        except BaseException as error:  # raised by the next save, or when the run ends
            self._error = error
