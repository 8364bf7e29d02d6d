"""Rollout files of any format, chosen by their ending, and the record form of a rollout."""

import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.pictures import PictureFolder, told, without_data
from lightning_rl.data.rollouts.validation import checked, whole
from lightning_rl.errors import ConfigError, DataError, kind_of_path, local_path
from lightning_rl.rollout import Call, Group, Rollout, Row

Record = dict[str, Any]

VIEW = "view.html"
"""The page that ``lightning-rl view`` writes into a run directory."""


@dataclass(frozen=True)
class Recorded:
    """A rollout, the iteration that collected it, and its location (``file.jsonl:12``)."""

    where: str
    iteration: int
    rollout: Rollout


class RolloutFile(ABC):
    """Rollouts on disk, written once and never changed; their pictures are in a folder beside them.

    Args:
        path: the file (for Parquet a folder of files); it need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path, "path")
        self.pictures = PictureFolder(self.path)

    @abstractmethod
    def append(
        self, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
    ) -> None:
        """Append a batch atomically: if the process dies meanwhile, none of it is kept.

        :meth:`recover` returns ``progress`` (primitives).
        """

    @abstractmethod
    def recover(self) -> dict[str, Any] | None:
        """Undo a batch that was cut off; return the last complete batch's ``progress``.

        It is None if the file is empty.

        Raises:
            DataError: if the file holds rollouts that cannot be resumed from.
        """

    @abstractmethod
    def read(self) -> Iterator[Recorded]:
        """Yield all rollouts in the order of writing, also while another process appends.

        Raises:
            DataError: naming file and line, if the file is missing or damaged.
        """

    def tail(self, count: int) -> tuple[list[Record], int]:
        """Return the last ``count`` records, with all that was recorded beside them, and their
        total.

        Unlike :meth:`read` it returns records with invalid content, so that they can be viewed.

        Raises:
            DataError: naming file and line, for a line that is not a record at all.
        """
        last: deque[Recorded] = deque(maxlen=count)
        total = 0
        for total, recorded in enumerate(self.read(), 1):  # noqa: B007
            last.append(recorded)
        return [{"iteration": r.iteration} | whole(as_record(r.rollout)) for r in last], total

    def groups(self) -> list[Group]:
        """Return all rollouts by group, in the order of their first members.

        Raises:
            DataError: if a group's rollouts have different prompts, or as :meth:`read`.
        """
        groups: dict[str, Group] = {}
        for recorded in self.read():
            rollout = recorded.rollout
            group = groups.setdefault(rollout.group_id, [])
            if group and group[0].prompt.token_ids != rollout.prompt.token_ids:
                raise DataError(
                    f"{recorded.where}: group {rollout.group_id!r} has a different prompt here "
                    "than before; keep the rollouts of different runs in different files"
                )
            group.append(rollout)
        return list(groups.values())

    def close(self) -> None:
        """Release the file; closing it twice is fine."""

    def _continuable(
        self, progress: dict[str, Any] | None, holds_rollouts: bool
    ) -> dict[str, Any] | None:
        if holds_rollouts and progress is None:
            raise DataError(
                f"{self.path} holds rollouts, but no record of the progress of "
                "`lightning-rl rollout`, so it cannot be resumed; use another file"
            )
        return progress

    def require_existing(self) -> None:
        """Raise a DataError if there is no such file, or if it cannot be read as one."""
        require_plain_file(self.path, folder=True)
        if not self.path.exists():
            raise DataError(
                f"rollout file {str(self.path)!r} does not exist (working directory: "
                f"{Path.cwd()}); write one with `lightning-rl rollout`"
            )


def require_plain_file(path: Path, folder: bool = False) -> None:
    """Refuse what is not a file: reading a named pipe would block forever.

    Raises:
        DataError: saying what it is.
    """
    kind = kind_of_path(path)
    if kind is None or (folder and path.is_dir()):
        return
    raise DataError(f"{path} is {kind}, not a file; name a file, or remove it")


def as_record(rollout: Rollout) -> Record:
    """Return the record of a rollout: its ``id``, and its fields as primitives.

    It is like ``Rollout.to_dict``, but shares the rollout's lists, which are long. ``prompt_ids``
    are None in rows that continue the rollout's own prompt. Pictures are referenced by digest; the
    :class:`PictureFolder` stores their bytes.
    """
    record: Record = {"id": rollout.id} | _shallow(rollout)
    record["prompt"] = _shallow(rollout.prompt)
    record["sampling"] = _shallow(rollout.sampling)
    record["status"] = rollout.status.value
    record["rows"] = [_shallow(row) for row in rollout.rows]
    for row in record["rows"]:
        row["sampling"] = row["sampling"] and _shallow(row["sampling"])
        if row["prompt_ids"] == rollout.prompt.token_ids:
            row["prompt_ids"] = None
    record["calls"] = [_shallow(call) for call in rollout.calls]
    record["fork"] = rollout.fork and _shallow(rollout.fork)
    return record


def _shallow(record: Any) -> Record:
    """Return a dataclass's fields, sharing its lists; pictures are referenced by digest."""
    made = {name: getattr(record, name) for name in record.__slots__}
    if made.get("pictures"):
        made["pictures"] = told(made["pictures"])
    return made


def as_rollout(where: str, record: Any, pictures: PictureFolder | None = None) -> Rollout:
    """Return the rollout of a record; ``pictures`` holds its pictures (None: they are empty).

    Raises:
        DataError: naming the location, if the record is not a rollout, or lacks a picture.
    """
    filled = without_data(record) if pictures is None else pictures.fill(where, record)
    rollout = Rollout.from_dict(checked(where, filled))
    rows = rollout.rows
    lengths = [{len(getattr(row, name)) for name in ARRAYS} for row in rows]
    calls = [call for call in rollout.calls if not _is_within(call, rows)]
    for found in lengths:
        if len(found) != 1:
            raise DataError(
                f"{where}: token_ids, loss_mask, logprobs and versions differ in length "
                f"({sorted(found)}); they must have one entry per completion token"
            )
    if calls:
        raise DataError(
            f"{where}: a call refers to tokens {calls[0].start} to {calls[0].stop} of row "
            f"{calls[0].row}, which do not exist; restore the file"
        )
    return rollout


def _is_within(call: Call, rows: Sequence[Row]) -> bool:
    there = 0 <= call.row < len(rows)
    return there and 0 <= call.start <= call.stop <= len(rows[call.row].token_ids)


def as_json(record: Record) -> str:
    """Return a record as JSON that can be encoded in UTF-8.

    Where JSON has no form, dataclasses become objects, arrays lists, and other values text.
    """
    text = json.dumps(record, ensure_ascii=False, default=_plain)
    # Half of a surrogate pair, as a prompt file's "\ud83d" is, has no UTF-8.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


ARRAYS = {"token_ids": "<i4", "loss_mask": "?", "logprobs": "<f8", "versions": "<i4"}
"""Token arrays, with the types in which they are stored; logprobs are exact."""


def as_row(rollout: Rollout, iteration: int) -> Record:
    """Return the record as columns ``id`` ... ``tokens``, the arrays as lists, ``rest`` as JSON
    text.

    The arrays of several rows are concatenated; ``rest`` holds the number of ``tokens`` of each
    row. ``version_min`` and ``version_max`` are over the tokens that are trained on; None if there
    are none.
    """
    record = as_record(rollout)
    record["rows"] = [
        {"tokens": len(row["token_ids"])} | {k: v for k, v in row.items() if k not in ARRAYS}
        for row in record["rows"]
    ]
    return {
        "id": record.pop("id"),
        "iteration": iteration,
        **_told_of(rollout),
        **{name: getattr(rollout, name) for name in ARRAYS},
        "rest": as_json(record),
    }


def _told_of(rollout: Rollout) -> Record:
    """Return the columns that repeat, for database queries, values of ``rest`` and the arrays."""
    written = rollout.written_versions()
    return {
        "group_id": rollout.group_id,
        "prompt_id": rollout.prompt.id,
        "version_min": min(written, default=None),
        "version_max": max(written, default=None),
        "reward": rollout.reward,
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
        "tokens": rollout.length,
    }


def contradiction_in(row: Record, rollout: Rollout) -> str | None:
    """Return the first column of a row that contradicts its rollout; None if none does."""
    for name, value in _told_of(rollout).items():
        if name in row and row[name] != value:
            return f"its column {name} says {row[name]!r}, its JSON {value!r}"
    return None


def from_row(where: str, row: Record, pictures: PictureFolder) -> Rollout:
    """Return the rollout of a row that :func:`as_row` made; other columns are ignored.

    Raises:
        DataError: naming the location, if the row is not a rollout.
    """
    try:
        record = whole(json.loads(row["rest"]))
        left = {name: row[name] for name in ARRAYS}
        for part in reversed(record["rows"]):
            begin = len(left["token_ids"]) - part["tokens"]
            part |= {name: column[begin:] for name, column in left.items()}
            left = {name: column[:begin] for name, column in left.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: damaged row ({error!r}); restore the file") from error
    return as_rollout(where, record, pictures)


# Imported when asked for: the viewer reads JSON lines without waiting for numpy.
_KINDS = {
    ".jsonl": ("jsonl", "JSONLRollouts"),
    ".parquet": ("parquet", "ParquetRollouts"),
    ".sqlite": ("store", "RolloutStore"),
    ".db": ("store", "RolloutStore"),
}


RUN_FILES = ("recorded.jsonl", "rollouts.jsonl")
"""The files of RolloutRecorder and PreviewTable in a run directory; the first holds more."""


def recorded_files(run: Path) -> list[RolloutFile]:
    """Open those of ``RUN_FILES`` that a run directory holds."""
    return [open_rollouts(run / name) for name in RUN_FILES if (run / name).exists()]


def open_rollouts(path: str | Path) -> RolloutFile:
    """Open a file by its ending: ``.jsonl``, ``.parquet``, or ``.sqlite`` and ``.db``.

    Raises:
        ConfigError: if the ending is another.
    """
    ending = Path(path).suffix
    if ending not in _KINDS:
        raise ConfigError(
            f"rollout file {str(path)!r}: its ending must be one of {', '.join(_KINDS)}"
        )
    if Path(path).is_dir() and ending != ".parquet":
        raise ConfigError(f"rollout file {str(path)!r} is a directory; name a file")
    module, name = _KINDS[ending]
    kind: type[RolloutFile] = getattr(import_module(f"lightning_rl.data.rollouts.{module}"), name)
    return kind(path)
