"""Checkpoints to which every process writes its shard: folders that are whole or not there."""

import json
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException

from lightning_rl.errors import CheckpointError
from lightning_rl.run.folders import put_in_place, remove
from lightning_rl.run.rundir import free_space, write_whole

_SIZES = "files.json"
"""What each file of a folder holds, in bytes."""
_NEEDED = ("meta.pt", ".metadata")
"""What Lightning and torch write when all shards are on the disk."""


def writes_folders(trainer: Trainer) -> bool:
    """Tell whether a checkpoint of this run is a folder, not a file."""
    strategy = trainer.strategy
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def save_folder(trainer: Trainer, path: Path) -> None:
    """Save under ``path``, which changes only when all of it is on disk; call it on every rank.

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
        raise CheckpointError(
            f"{path} could not be written: {error} ({free_space(path)}); what was saved before is "
            "intact. Make room, or lower keep_last and keep_best, and go on from the last "
            "checkpoint"
        ) from error
    trainer.strategy.barrier("checkpoint folder is complete")


def damage_of_folder(path: Path) -> str | None:
    """Say what is wrong with a folder of shards; None if nothing is.

    Sizes are compared, not contents: no process reads all shards only to look at them. Of a folder
    that another callback wrote no sizes are known.
    """
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        return f"it is a folder without {' and '.join(missing)}, so not all of it was written"
    try:
        sizes = json.loads((path / _SIZES).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"its {_SIZES} is no JSON ({error})"
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            return f"its {name} has {found} of {size} bytes"
    return None
