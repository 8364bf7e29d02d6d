"""Datasets from files and from the 🤗 hub, whole or streamed."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.data.hub_faults import explained, patiently
from lightning_rl.data.prompt_pictures import as_stored
from lightning_rl.errors import DataError, first_line

_READERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}


def is_dataset(value: Any) -> bool:
    """Return True for a 🤗 ``Dataset``; imports nothing, as none exists before the import."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)


def load_files(path: str, files: list[str], reader: str) -> Any:
    """Return the rows of files that a reader of ``datasets`` takes; ``path`` is the user's name.

    Raises:
        DataError: if they cannot be read.
    """
    return _loaded(_builder_of_files(path, files, reader), path, None, None)


def load_rows(path: str, name: str | None, split: str | None, revision: str | None) -> Any:
    """Return the ``Dataset`` of a folder, a file, or a name on the hub; see ``HFDatasetPrompts``.

    Raises:
        DataError: says what is missing, or what the hub answers, and how to fix it.
    """
    import datasets

    if any((Path(path) / file).exists() for file in ("state.json", "dataset_dict.json")):
        _require_no_revision(path, revision)
        try:
            saved = datasets.load_from_disk(path)
        except Exception as error:  # whatever its reader raises of files that are not what it wrote
            raise DataError(
                f"{path}: damaged, or an incomplete copy of what save_to_disk wrote "
                f"({first_line(error)}); "
                "save it again, or copy the whole folder"
            ) from error
        return _split_of(saved, path, split)
    return _loaded(_builder_of(path, name, revision), path, split, revision)


def open_stream(path: str, name: str | None, split: str, revision: str | None) -> "RowStream":
    """Return the rows of a file, of a folder or of the hub, to be read one after the other.

    Raises:
        DataError: as :func:`load_rows`.
    """
    builder = _builder_of(path, name, revision)
    try:
        rows = builder.as_streaming_dataset(split)
        if as_stored(rows.features) is not None:
            rows = rows.decode(False)
        return RowStream(rows, path, builder.hash)
    except Exception as error:
        raise explained(error, path, name, split, revision) from error


class RowStream:
    """Rows that are read one after the other, from the first or from a saved state.

    ``version`` identifies them: on the hub it is the commit.
    """

    def __init__(self, rows: Any, path: str, version: str) -> None:
        self.version = version
        self.state: Any = None
        """Where the next block begins, as primitives; None for the first row."""
        self._rows = rows
        self._path = path
        self._iterator: Iterator[Any] = iter(rows)

    def rows(self) -> Iterator[Any]:
        """Yield all remaining rows, read block by block."""
        while block := self.block(1000):
            yield from block

    def block(self, count: int) -> list[Any]:
        """Return the next ``count`` rows, or as many as are left.

        Raises:
            DataError: if they cannot be read.
        """
        try:
            result = patiently(lambda: self._block(count))
        except Exception as error:
            raise explained(error, self._path) from error
        if result:
            self.state = self._rows.state_dict()
        return result

    def _block(self, count: int) -> list[Any]:
        try:
            return list(islice(self._iterator, count))
        except Exception:
            self.seek(self.state)  # nothing of it is taken, should it be asked for again
            raise

    def seek(self, state: Any) -> None:
        """Continue from a saved state."""
        self.state = state
        self._rows.load_state_dict(state)
        self._iterator = iter(self._rows)


def _loaded(builder: Any, path: str, split: str | None, revision: str | None) -> Any:
    from lightning_rl.data.compressed import CheckedDownloads

    try:
        patiently(lambda: builder.download_and_prepare(dl_manager=CheckedDownloads(builder)))
        found = builder.as_dataset()
    except DataError:
        raise
    except Exception as error:
        raise explained(error, path, None, split, revision) from error
    return _split_of(found, path, split)


def _builder_of_files(path: str, files: list[str], reader: str, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset_builder(reader, data_files=files, **options)
    except Exception as error:
        raise explained(error, path) from error


def _builder_of(path: str, name: str | None, revision: str | None) -> Any:
    """Return the builder of a dataset from a file or folder, or from the hub."""
    import datasets
    from huggingface_hub import constants

    local = Path(path)
    if local.exists():
        _require_no_revision(path, revision)
        if local.is_file():
            if local.suffix not in _READERS:
                raise DataError(f"{path!r}: expected a file of one of {', '.join(_READERS)}")
            options = {"sep": "\t"} if local.suffix == ".tsv" else {}
            return _builder_of_files(path, [path], _READERS[local.suffix], **options)
    elif local.suffix in _READERS or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
        raise DataError(
            f"dataset path={path!r} does not exist (working directory: {Path.cwd()}); correct path"
        )

    def asked() -> Any:
        builder = datasets.load_dataset_builder(path, name, revision=revision)
        if _is_of_cache(builder) and not constants.is_offline_mode():
            raise _Unreached(builder)
        return builder

    try:
        builder = patiently(asked)
    except _Unreached as unreached:
        builder = unreached.builder
    except Exception as error:
        raise explained(error, path, name, None, revision) from error
    if _is_of_cache(builder):
        _require_commit(builder.hash, path, revision)
    return builder


class _Unreached(ConnectionError):
    """The hub did not answer, and ``datasets`` silently used its newest cached version."""

    def __init__(self, builder: Any) -> None:
        super().__init__("the hub was not reached")
        self.builder = builder


def _is_of_cache(builder: Any) -> bool:
    return type(builder).__module__.endswith("packaged_modules.cache.cache")


def _require_no_revision(path: str, revision: str | None) -> None:
    if revision is not None:
        raise DataError(
            f"{path!r} is on disk, where revision={revision!r} does not apply; remove it"
        )


def _require_commit(commit: str, path: str, revision: str | None) -> None:
    """Require that the cache's newest commit is the revision asked for, as the hub is down."""
    from huggingface_hub import constants

    wanted = revision or "main"  # what the hub takes where nothing is asked for
    if not re.fullmatch("[0-9a-f]{40}", wanted):
        folder = f"datasets--{path.replace('/', '--')}"
        ref = Path(constants.HF_HUB_CACHE, folder, "refs", wanted)
        wanted = ref.read_text("utf-8").strip() if ref.is_file() else "an unknown commit"
    if wanted != commit:
        raise DataError(
            f"{path!r}: the hub was not reached, and revision={revision!r} ({wanted}) is not what "
            f"the cache holds (commit {commit}); load it once with the hub, or set "
            f"revision={commit!r}"
        )
    rank_zero_warn(f"{path!r}: the hub was not reached; using the cached commit {commit}")


def _split_of(found: Any, path: str, split: str | None) -> Any:
    """Return the rows of a split such as ``train[:90%]``; None stands for the only one."""
    import datasets

    if isinstance(found, datasets.Dataset):  # saved without splits
        if split is None:
            return found
        found = datasets.DatasetDict({"train": found})
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    sizes = {name: len(rows) for name, rows in found.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split or "").to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{path}: split={split!r} is not one of {sorted(found)}, nor a slice of one such as "
            f"{min(found)}[:90%]; set split"
        ) from error
    rows = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows)
