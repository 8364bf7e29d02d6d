"""Rollouts as Parquet: a folder with a file per batch, for pandas, DuckDB and 🤗 datasets."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.files import (
    ARRAYS,
    Recorded,
    RolloutFile,
    as_row,
    contradiction_in,
    from_row,
)
from lightning_rl.data.rollouts.pictures import PictureFolder
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout

_PROGRESS = b"lightning_rl.progress"


class ParquetRollouts(RolloutFile):
    """A folder of ``part-00000.parquet``, ...: each file is written atomically.

    A row holds the columns of :func:`~lightning_rl.data.rollouts.files.as_row`. A single Parquet
    file with these columns can be read as well.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        # Beside the parts, wherever the folder is moved.
        self.pictures = PictureFolder(self.path if self.path.is_file() else self.path / "part")

    def append(
        self, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
    ) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / f"part-{len(self._parts()):05d}.parquet"
        write_part(part, rollouts, iteration, progress)

    def recover(self) -> dict[str, Any] | None:
        import pyarrow.parquet

        if self.path.is_file():
            raise DataError(
                f"{self.path} is a single Parquet file, which cannot be appended to; use a "
                "folder, or a path that does not exist"
            )
        for unfinished in self.path.glob("part-*.unfinished"):
            unfinished.unlink()
        parts = self._parts() if self.path.exists() else []
        if not parts:
            return None
        with _named(parts[-1]):
            metadata = pyarrow.parquet.read_schema(parts[-1]).metadata or {}
        return self._continuable(json.loads(metadata.get(_PROGRESS, "null")), True)

    def read(self) -> Iterator[Recorded]:
        self.require_existing()
        for part in self._parts():
            for number, row in enumerate(self._rows(part)):
                where = f"{part}: row {number}"
                yield Recorded(
                    where, row.get("iteration") or 0, from_row(where, row, self.pictures)
                )

    def contradictions(self) -> Iterator[str]:
        """Yield the rows whose columns contradict their JSON; no row that this library writes does.

        Raises:
            DataError: if a file is damaged.
        """
        for part in self._parts():
            for number, row in enumerate(self._rows(part)):
                rollout = from_row(f"{part}: row {number}", row, self.pictures)
                if (what := contradiction_in(row, rollout)) is not None:
                    yield f"row {number}: {what}"

    def _parts(self) -> list[Path]:
        return [self.path] if self.path.is_file() else sorted(self.path.glob("part-*.parquet"))

    def _rows(self, part: Path) -> list[dict[str, Any]]:
        import pyarrow.parquet

        with _named(part), pyarrow.parquet.ParquetFile(part) as file:
            rows: list[dict[str, Any]] = file.read().to_pylist()
        return rows


def write_part(
    path: Path, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
) -> None:
    """Write a single file atomically, replacing an earlier one."""
    import pyarrow
    import pyarrow.parquet

    PictureFolder(path).write(rollouts)
    rows = [as_row(rollout, iteration) for rollout in rollouts]
    table = pyarrow.Table.from_pylist(rows, schema=_schema())
    table = table.replace_schema_metadata({_PROGRESS: json.dumps(progress)})
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        pyarrow.parquet.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@contextmanager
def _named(part: Path) -> Iterator[None]:
    import pyarrow.lib

    try:
        yield
    except (pyarrow.lib.ArrowException, OSError) as error:  # OSError: a page that cannot be read
        raise DataError(f"{part}: not a Parquet file, or damaged ({error}); restore it") from error


def _schema() -> Any:
    import pyarrow as pa

    types = {"<i4": pa.int32(), "?": pa.bool_(), "<f8": pa.float64()}
    numbers = {name: pa.int64() for name in ("iteration", "version_min", "version_max", "tokens")}
    texts = ("id", "group_id", "prompt_id", "status", "finish_reason", "rest")
    arrays = {name: pa.list_(types[width]) for name, width in ARRAYS.items()}
    columns = {
        **{name: pa.string() for name in texts},
        **numbers,
        "reward": pa.float64(),
        **arrays,
    }
    return pa.schema(list(columns.items()))
