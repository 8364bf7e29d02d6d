"""Where a run leaves its files."""

from pathlib import Path

from lightning.pytorch import Trainer


def run_dir(trainer: Trainer) -> Path:
    """The first logger's directory (``trainer.log_dir``), or the root directory; created."""
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
