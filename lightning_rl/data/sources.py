"""Where prompts come from: files, datasets folders, or Python."""

import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_rl.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import DataError


def _existing(path: str | Path, what: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise DataError(
            f"{what} path={str(path)!r} does not exist (working directory: {Path.cwd()}); "
            "correct path"
        )
    return found


def _existing_file(path: str | Path, what: str) -> Path:
    found = _existing(path, what)
    if found.is_dir():
        inside = sorted(file.name for file in found.iterdir() if file.is_file())[:3]
        held = f"it holds {', '.join(inside)}" if inside else "there is no file in it"
        raise DataError(f"{what} path={str(path)!r} is a directory ({held}); name a file")
    return found


@configurable
class JSONLPrompts(PromptDataset):
    """One JSON object per line of the file ``path``; blank lines are skipped."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def __repr__(self) -> str:
        return f"JSONLPrompts({self.path!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        with _existing_file(self.path, "prompt file").open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                where = f"{self.path}:{number}"
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: expected UTF-8 text ({error})") from error
                if not line.strip():
                    continue
                try:
                    yield where, json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: expected one JSON object per line, found {error.msg} at column "
                        f"{error.colno}: {line.strip()!r:.80}"
                    ) from error


@configurable
class ParquetPrompts(PromptDataset):
    """The rows of a Parquet file or of a directory of them."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def __repr__(self) -> str:
        return f"ParquetPrompts({self.path!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        import pyarrow.lib
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(_existing(self.path, "prompt file"))
        except pyarrow.lib.ArrowException as error:
            raise DataError(f"{self.path}: not a Parquet file ({error})") from error
        for number, row in enumerate(table.to_pylist()):
            yield f"{self.path}: row {number}", row


@configurable
class HFDatasetPrompts(PromptDataset):
    """A 🤗 ``datasets`` folder, as ``Dataset.save_to_disk`` writes it.

    Args:
        path: the folder.
        split: which split of a ``DatasetDict``; None for a plain ``Dataset``.
    """

    def __init__(self, path: str, split: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.path = path
        self.split = split

    def __repr__(self) -> str:
        return f"HFDatasetPrompts({self.path!r}, split={self.split!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        import datasets

        try:
            dataset = datasets.load_from_disk(str(_existing(self.path, "dataset folder")))
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: not a folder that save_to_disk wrote") from error
        if isinstance(dataset, datasets.DatasetDict):
            if self.split not in dataset:
                raise DataError(
                    f"{self.path}: split={self.split!r} is not one of {sorted(dataset)}; set split"
                )
            dataset = dataset[self.split]
        for number, row in enumerate(dataset):
            yield f"{self.path}: row {number}", row


@configurable
class IterablePrompts(PromptDataset):
    """Rows from Python: an iterable of them, or a callable that returns one.

    A row is a mapping, or a prompt alone: a string, or a list of chat messages.

    Args:
        rows: the iterable, or in YAML the import path of a callable.
        arguments: keyword arguments for the callable.
    """

    def __init__(
        self,
        rows: Callable[..., Iterable[Any]] | Iterable[Any],
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rows = rows
        self.arguments = arguments or {}

    def __repr__(self) -> str:
        return f"IterablePrompts({getattr(self.rows, '__name__', type(self.rows).__name__)})"

    def read(self) -> Iterable[tuple[str, Any]]:
        rows = self.rows(**self.arguments) if callable(self.rows) else self.rows
        for number, row in enumerate(rows):
            alone = isinstance(row, str | list)
            yield f"{self!r}: row {number}", {self.prompt_column: row} if alone else row


def prompts_of(value: Any) -> Any:
    """The dataset that a path or rows in Python stand for; what is neither, as it is.

    A path is a ``.jsonl`` or ``.parquet`` file, or a folder that ``Dataset.save_to_disk`` wrote.
    Rows are a list, or a 🤗 ``Dataset``.
    """
    if isinstance(value, list | tuple) or (
        hasattr(value, "column_names") and not isinstance(value, Mapping)
    ):
        return IterablePrompts(value)
    if not isinstance(value, str | PathLike):
        return value
    path = Path(value)
    if path.suffix in _KINDS:
        return _KINDS[path.suffix](str(path))
    if path.is_dir():
        return (ParquetPrompts if any(path.glob("*.parquet")) else HFDatasetPrompts)(str(path))
    if path.exists() or isinstance(value, PathLike):
        raise DataError(
            f"prompts {str(path)!r}: expected a .jsonl or .parquet file, or a folder of "
            "Dataset.save_to_disk; read anything else into a list of rows"
        )
    return value


_KINDS: dict[str, type[JSONLPrompts | ParquetPrompts]] = {
    ".jsonl": JSONLPrompts,
    ".parquet": ParquetPrompts,
}
