"""Sources of prompts: files, folders of datasets, Python or reasoning-gym; and rows to imitate."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jsonargparse.typing import register_type

from lightning_rl.config.arguments import configurable
from lightning_rl.data.hub import is_dataset, load_files, load_rows
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.tables import DatasetTable, JSONLTable, Table
from lightning_rl.errors import ConfigError, DataError, kind_of_path
from lightning_rl.rollout import answer_in
from lightning_rl.vision.limits import OWN, PictureAccess


def _existing(path: str | Path, what: str) -> Path:
    result = Path(path)
    if not result.exists():
        raise DataError(
            f"{what} path={str(path)!r} does not exist (working directory: {Path.cwd()}); "
            "correct path"
        )
    return result


def _existing_file(path: str | Path, what: str) -> Path:
    result = _existing(path, what)
    if result.is_dir():
        inside = sorted(file.name for file in result.iterdir() if file.is_file())[:3]
        held = f"it holds {', '.join(inside)}" if inside else "there is no file in it"
        raise DataError(f"{what} path={str(path)!r} is a directory ({held}); name a file")
    kind = kind_of_path(result)
    if kind is not None:
        raise DataError(f"{what} path={str(path)!r} is {kind}, not a file; name a file")
    return result


def pictures_beside(path: str) -> tuple[Path | None, PictureAccess]:
    """Return the folder of a file's pictures, and what its rows may name; hub rows are less
    trusted.
    """
    folder = Path(path).absolute()
    if not folder.exists():
        return None, PictureAccess(private_hosts=False)
    return folder if folder.is_dir() else folder.parent, OWN


@configurable
class TablePrompts(PromptDataset):
    """Rows that stay on disk; subclasses implement ``table``.

    Args:
        path: the file or the folder.
    """

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def pictures_from(self) -> tuple[Path | None, PictureAccess]:
        return pictures_beside(self.path)

    @abstractmethod
    def table(self) -> Table:
        """Return the rows, by number."""

    def read(self) -> Iterable[tuple[str, Any]]:
        table = self.table()
        return ((table.where(index), row) for index, row in enumerate(table))


@configurable
class JSONLPrompts(TablePrompts):
    """One JSON object per line of the file ``path``; blank lines are skipped.

    Lines are read when they are drawn, unchanged: values of one column may have several types.

    Args:
        path: the file.
    """

    def table(self) -> Table:
        _existing_file(self.path, "prompt file")
        return JSONLTable(self.path)


@configurable
class ParquetPrompts(TablePrompts):
    """The rows of a Parquet file or of a folder of them; 🤗 ``datasets`` caches them as Arrow.

    Args:
        path: the file or the folder.
    """

    def table(self) -> Table:
        found = _existing(self.path, "prompt file")
        files = sorted(map(str, found.rglob("*.parquet"))) if found.is_dir() else [str(found)]
        if not files:
            raise DataError(f"{self.path}: it holds no .parquet file; correct path")
        return DatasetTable(load_files(self.path, files, "parquet"), self.path)


@configurable
class HFDatasetPrompts(TablePrompts):
    """A dataset of the 🤗 hub, or files on disk, through ``datasets.load_dataset``.

    Rows stay in its cache, as Arrow files that are memory-mapped. For datasets that do not fit
    there, see :class:`HFStreamingPrompts`.

    Args:
        path: the dataset's name on the hub (``openai/gsm8k``); a folder that
            ``Dataset.save_to_disk`` wrote; another folder, or a file: Parquet, JSON lines, CSV or
            Arrow.
        name: the name of the dataset's configuration (its subset).
        split: such as ``train`` or ``train[:90%]``; None: the only one.
        revision: a branch, tag or commit of the hub; None: the newest.
        options: further arguments of ``PromptDataset``.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.name = name
        self.split = split
        self.revision = revision

    def __repr__(self) -> str:
        given = {"name": self.name, "split": self.split, "revision": self.revision}
        arguments = [f"{key}={value!r}" for key, value in given.items() if value is not None]
        return f"{type(self).__name__}({', '.join([repr(self.path), *arguments])})"

    def table(self) -> Table:
        return DatasetTable(load_rows(self.path, self.name, self.split, self.revision), self.path)


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

    def table(self) -> Table:
        if is_dataset(self.rows):
            return DatasetTable(self.rows, repr(self))
        return super().table()

    def read(self) -> Iterable[tuple[str, Any]]:
        rows = self.rows(**self.arguments) if callable(self.rows) else self.rows
        for number, row in enumerate(rows):
            alone = isinstance(row, str | list)
            yield f"{self!r}: row {number}", {self.prompt_column: row} if alone else row


@configurable
class ReasoningGymPrompts(PromptDataset):
    """Procedurally generated questions; grade them with :func:`reasoning_gym_score`.

    Args:
        task: a reasoning-gym dataset name, e.g. ``chain_sum``.
        size: number of questions.
        task_seed: determines the questions. Question i is made from ``task_seed + i``, so held-out
            prompts need a seed at least ``size`` away; short tasks may repeat questions even then.
        config: the task's own options, e.g. ``{"min_terms": 2}``.
        chat: make the question the user's message of a chat; False: plain text.
        options: further arguments of ``PromptDataset``.
    """

    def __init__(
        self,
        task: str,
        size: int = 1000,
        task_seed: int = 0,
        config: dict[str, Any] | None = None,
        chat: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(chat=chat, **options)
        self.task = task
        self.size = size
        self.task_seed = task_seed
        self.config = config or {}

    def __repr__(self) -> str:
        return f"ReasoningGymPrompts({self.task!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        for number, entry in enumerate(self._dataset()):
            row = {self.prompt_column: entry["question"], "entry": entry, "task": self.task}
            yield f"{self!r}: row {number}", row

    def _dataset(self) -> Iterable[dict[str, Any]]:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError(
                "ReasoningGymPrompts needs reasoning-gym: `pip install 'reasoning-gym>=0.1.20'`"
            ) from error
        try:
            return reasoning_gym.create_dataset(
                self.task, size=self.size, seed=self.task_seed, **self.config
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym task={self.task!r} {self.config}: {error}") from error


class PromptPath(str):
    """The path of a file of prompts, or of a folder of them."""

    def __new__(cls, path: str) -> "PromptPath":
        if Path(path).suffix not in _KINDS and not Path(path).is_dir():
            raise ValueError(f"{path!r} is neither a folder nor a file ({', '.join(_KINDS)})")
        return super().__new__(cls, path)


def _told(path: Any) -> str:
    """Return a path as configurations write it; the parser calls this for any argument."""
    if not isinstance(path, PromptPath):
        raise ValueError(f"{path!r} is not a path")
    return str(path)


register_type(PromptPath, _told)

if TYPE_CHECKING:
    AnyPrompts: TypeAlias = PromptDataset
else:
    AnyPrompts = PromptPath | PromptDataset
"""What constructors accept as prompts; :func:`prompts_of` turns it into a ``PromptDataset``."""


def prompts_of(value: Any) -> Any:
    """Return the dataset for a path or for rows in Python; any other value is returned unchanged.

    A path is a file (JSON lines, Parquet, CSV or Arrow), a folder of such files, or one that
    ``Dataset.save_to_disk`` wrote. Rows are a list, a 🤗 ``Dataset``, or a table of pandas, Polars
    or Arrow.
    """
    value = _rows_of_table(value)
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
            f"prompts {str(path)!r}: expected a folder or a file ({', '.join(_KINDS)}); read "
            "anything else into a list of rows"
        )
    return value


def _rows_of_table(value: Any) -> Any:
    """Return a table as a list of its rows; any other value unchanged."""
    if isinstance(value, Mapping | PromptDataset | type):
        return value
    for method in ("to_pylist", "to_dicts"):  # of Arrow and of Polars
        if hasattr(value, method):
            return getattr(value, method)()
    is_frame = hasattr(value, "iloc") and hasattr(value, "to_dict")  # of pandas
    return [_listed(row) for row in value.to_dict("records")] if is_frame else value


def _listed(value: Any) -> Any:
    """Convert the arrays that pandas returns for lists in Parquet to lists."""
    if isinstance(value, np.ndarray):
        return [_listed(inner) for inner in value.tolist()]
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return value


_KINDS: dict[str, type[JSONLPrompts | ParquetPrompts | HFDatasetPrompts]] = {
    ".jsonl": JSONLPrompts,
    ".parquet": ParquetPrompts,
    **dict.fromkeys((".json", ".csv", ".tsv", ".arrow"), HFDatasetPrompts),
}


def reasoning_gym_score(
    completions: list[Any],
    entry: list[dict[str, Any]],
    task: list[str],
    opened_thoughts: list[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """Score each answer by the task's own verifier, in [0, 1].

    The answer is the text between the last ``<answer>`` and ``</answer>``, or else the whole text.
    Of a thought only the text after ``</think>`` counts, and an unfinished one scores 0.
    """
    opened = opened_thoughts or [False] * len(completions)
    scores = []
    for completion, item, name, in_thought in zip(completions, entry, task, opened, strict=True):
        answer = answer_in(completion, in_thought)
        scores.append(0.0 if answer is None else float(_scorer(name)(_answer(answer), item)))
    return scores


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _answer(text: str) -> str:
    opened = text.rfind("<answer>")
    if opened < 0:
        return text.strip()
    return text[opened + len("<answer>") :].split("</answer>")[0].strip()
