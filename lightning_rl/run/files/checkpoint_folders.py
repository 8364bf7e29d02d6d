"""Sharded checkpoints: folders to which every process writes its shard, replaced atomically."""

import json
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException

from lightning_rl.errors import CheckpointError
from lightning_rl.run.files.folders import put_in_place, remove
from lightning_rl.run.files.rundir import free_space, write_whole

_SIZES = "files.json"
"""File that lists the size in bytes of each file in the folder."""
_NEEDED = ("meta.pt", ".metadata")
"""Files that Lightning and torch write once all shards are on disk."""


def writes_folders(trainer: Trainer) -> bool:
    """Return True if checkpoints of this run are folders of shards, not single files."""
    strategy = trainer.strategy
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def save_folder(trainer: Trainer, path: Path) -> None:
    """Save a sharded checkpoint at ``path``, which changes only when all of it is on disk.

    Call it on every rank.

    Raises:
        CheckpointError: if a shard cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    if trainer.is_global_zero:
        remove(partial)
    trainer.strategy.barrier("checkpoint folder is empty")  # else a shard could be removed, too
    try:
        trainer.save_checkpoint(partial, weights_only=False)
        if trainer.is_global_zero:
            sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            write_whole(partial / _SIZES, json.dumps(sizes, indent=1) + "\n")
            put_in_place(partial, path)
    except (OSError, CheckpointException) as error:
        raise unwritten(path, error) from error
    trainer.strategy.barrier("checkpoint folder is complete")


def unwritten(path: Path, error: object) -> CheckpointError:
    """Return the error of a checkpoint that could not be written."""
    return CheckpointError(
        f"{path} could not be written: {error} ({free_space(path)}); the checkpoint saved "
        "before is intact. Free some disk space, or lower keep_last and keep_best, and resume "
        "from the last checkpoint"
    )


def damage_of_folder(path: Path) -> str | None:
    """Describe the damage of a folder of shards; None if it is intact.

    Only sizes are compared, not contents: no process reads all shards just to check them. A folder
    that another callback wrote has no list of sizes, so none are compared.
    """
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        return f"the folder lacks {' and '.join(missing)}, so it was not written completely"
    try:
        sizes = json.loads((path / _SIZES).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"its {_SIZES} is not valid JSON ({error})"
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            return f"its {name} has {found} of {size} bytes"
    return None
