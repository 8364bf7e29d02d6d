"""A rollout file's class, by its ending."""

from importlib import import_module
from pathlib import Path

from lightning_rl.buffer.base import RolloutFile
from lightning_rl.errors import ConfigError

# Imported when asked for: the viewer reads JSON lines without waiting for numpy.
_KINDS = {
    ".jsonl": ("jsonl", "JSONLRollouts"),
    ".parquet": ("parquet", "ParquetRollouts"),
    ".sqlite": ("store", "RolloutStore"),
    ".db": ("store", "RolloutStore"),
}


def open_rollouts(path: str | Path) -> RolloutFile:
    """The file's class by its ending: ``.jsonl``, ``.parquet``, or ``.sqlite`` and ``.db``.

    Raises:
        ConfigError: for another ending.
    """
    ending = Path(path).suffix
    if ending not in _KINDS:
        raise ConfigError(
            f"rollout file {str(path)!r}: the ending tells the format, and must be one of "
            f"{', '.join(_KINDS)}"
        )
    if Path(path).is_dir() and ending != ".parquet":
        raise ConfigError(f"rollout file {str(path)!r} is a directory; name a file")
    module, name = _KINDS[ending]
    kind: type[RolloutFile] = getattr(import_module(f"lightning_rl.buffer.{module}"), name)
    return kind(path)
