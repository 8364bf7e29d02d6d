"""Sources of prompts: files, folders of data sets, Python or reasoning-gym; rows to imitate."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonargparse.typing import register_type
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import ConfigError, DataError, kind_of_path
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row
from lightning_rl.run import dist


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
    kind = kind_of_path(found)
    if kind is not None:
        raise DataError(f"{what} path={str(path)!r} is {kind}, not a file; name a file")
    return found


@configurable
class _FilePrompts(PromptDataset):
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


class JSONLPrompts(_FilePrompts):
    """One JSON object per line of the file ``path``; blank lines are skipped."""

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


class ParquetPrompts(_FilePrompts):
    """The rows of a Parquet file or of a directory of them."""

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


@configurable
class ReasoningGymPrompts(PromptDataset):
    """Procedural questions; grade them with :func:`reasoning_gym_score`.

    Args:
        task: a reasoning-gym dataset name, e.g. ``chain_sum``.
        size: how many questions.
        task_seed: which questions. Question i is made from ``task_seed + i``, so held-out prompts
            need one that is at least ``size`` away; short tasks may repeat questions even then.
        config: the task's own options, e.g. ``{"min_terms": 2}``.
        system: a system message; None: the question is the only message.
        chat: render through the tokenizer's chat template; False: plain text.
    """

    def __init__(
        self,
        task: str,
        size: int = 1000,
        task_seed: int = 0,
        config: dict[str, Any] | None = None,
        system: str | None = None,
        chat: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.task = task
        self.size = size
        self.task_seed = task_seed
        self.config = config or {}
        self.system = system
        self.chat = chat

    def __repr__(self) -> str:
        return f"ReasoningGymPrompts({self.task!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        for number, entry in enumerate(self._dataset()):
            question: Any = entry["question"]
            if self.chat:
                system = [] if self.system is None else [{"role": "system", "content": self.system}]
                question = [*system, {"role": "user", "content": question}]
            row = {self.prompt_column: question, "entry": entry, "task": self.task}
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
    """A ``.jsonl`` or ``.parquet`` file of prompts, or a folder that ``save_to_disk`` wrote."""

    def __new__(cls, path: str) -> "PromptPath":
        if Path(path).suffix not in _KINDS and not Path(path).is_dir():
            raise ValueError(f"{path!r} is neither a .jsonl or .parquet file nor a folder")
        return super().__new__(cls, path)


def _told(path: Any) -> str:
    """A path as a configuration tells it; the parser asks for whatever the argument may be."""
    if not isinstance(path, PromptPath):
        raise ValueError(f"{path!r} is no path")
    return str(path)


register_type(PromptPath, _told)

if TYPE_CHECKING:
    AnyPrompts: TypeAlias = PromptDataset
else:
    AnyPrompts = PromptPath | PromptDataset
"""What a constructor takes for prompts, of which :func:`prompts_of` makes a ``PromptDataset``."""


def prompts_of(value: Any) -> Any:
    """The dataset that a path or rows in Python stand for; what is neither, as it is.

    A path is a ``.jsonl`` or ``.parquet`` file, or a folder that ``Dataset.save_to_disk`` wrote.
    Rows are a list, a 🤗 ``Dataset``, or a table of pandas, Polars or Arrow.
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
            f"prompts {str(path)!r}: expected a .jsonl or .parquet file, or a folder of "
            "Dataset.save_to_disk; read anything else into a list of rows"
        )
    return value


def _rows_of_table(value: Any) -> Any:
    """A table as a list of its rows; anything else as it is."""
    if isinstance(value, Mapping | PromptDataset | type):
        return value
    for method in ("to_pylist", "to_dicts"):  # of Arrow and of Polars
        if hasattr(value, method):
            return getattr(value, method)()
    is_frame = hasattr(value, "iloc") and hasattr(value, "to_dict")  # of pandas
    return value.to_dict("records") if is_frame else value


_KINDS: dict[str, type[JSONLPrompts | ParquetPrompts]] = {
    ".jsonl": JSONLPrompts,
    ".parquet": ParquetPrompts,
}


def expert_rollouts(
    prompts: PromptDataset, count: int, iteration: int, tokenizer: PreTrainedTokenizerBase
) -> list[Rollout]:
    """This rank's share of the next ``count`` rows with a ``completion``, to be imitated.

    Each is a group of its own, so that its advantage is zero.
    """
    rollouts = []
    for number, prompt in dist.shard(list(enumerate(prompts.draw(count)))):
        rollout = supervised_rollout(prompt, "completion", tokenizer)
        rollout.group_id = f"{iteration + 1}/expert/{number}"
        rollouts.append(rollout)
    return rollouts


def supervised_rollout(
    prompt: Prompt, completion_column: str, tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    """A given completion as a rollout that the policy is to imitate.

    A string is tokenised and gets the end token; a list of token ids is taken as it is.

    Raises:
        DataError: if the row has no completion.
    """
    given = prompt.columns.get(completion_column)
    if isinstance(given, str):
        token_ids = tokenizer(given, add_special_tokens=False)["input_ids"]
        token_ids = [*token_ids, tokenizer.eos_token_id]
    elif isinstance(given, list) and given and all(isinstance(t, int) for t in given):
        token_ids = given
    else:
        raise DataError(
            f"row {prompt.id}: {completion_column!r} must be a string or a list of token ids, got "
            f"{given!r:.80}; name the column that holds the completion"
        )
    count = len(token_ids)
    return Rollout(
        prompt=prompt,
        group_id=prompt.id,
        sample_index=0,
        seed=0,
        rows=[Row(prompt.token_ids, token_ids, [True] * count, [0.0] * count, [-1] * count)],
        completion=given if isinstance(given, str) else tokenizer.decode(given),
        status=RolloutStatus.COMPLETED,
        finish_reason="stop",
        reward=0.0,
        expert=True,
    )


def reasoning_gym_score(
    completions: list[Any], entry: list[dict[str, Any]], task: list[str], **columns: Any
) -> list[float]:
    """The task's own verifier on each answer, in [0, 1].

    The answer is what stands between the last ``<answer>`` and ``</answer>``, else the whole text.
    """
    scores = []
    for completion, item, name in zip(completions, entry, task, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        scores.append(float(_scorer(name)(_answer(text), item)))
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
