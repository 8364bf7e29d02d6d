"""A rollout file's class, by its ending."""

from pathlib import Path

from lightning_rl.buffer.base import RolloutFile
from lightning_rl.buffer.jsonl import JSONLRollouts
from lightning_rl.buffer.parquet import ParquetRollouts
from lightning_rl.buffer.store import RolloutStore
from lightning_rl.errors import ConfigError

_KINDS: dict[str, type[RolloutFile]] = {
    ".jsonl": JSONLRollouts,
    ".parquet": ParquetRollouts,
    ".sqlite": RolloutStore,
    ".db": RolloutStore,
}


def open_rollouts(path: str | Path) -> RolloutFile:
    """The file's class by its ending: ``.jsonl``, ``.parquet``, or ``.sqlite`` and ``.db``.

    Raises:
        ConfigError: for another ending.
    """
    kind = _KINDS.get(Path(path).suffix)
    if kind is None:
        raise ConfigError(
            f"rollout file {str(path)!r}: the ending tells the format, and must be one of "
            f"{', '.join(_KINDS)}"
        )
    if Path(path).is_dir() and kind is not ParquetRollouts:
        raise ConfigError(f"rollout file {str(path)!r} is a directory; name a file")
    return kind(path)
