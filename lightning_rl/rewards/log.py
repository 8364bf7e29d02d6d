"""Arguments of TRL's reward functions besides data: training progress and logging."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"] | None
"""Types that every record of a rollout can hold."""


@dataclass(frozen=True)
class TrainerState:
    """Training progress, named as in transformers' class; a step is an iteration here.

    Args:
        global_step: iterations before the one being graded.
        max_steps: iterations of the whole run; -1 if unlimited.
        epoch: ``global_step`` in epochs.
        num_train_epochs: epochs of the whole run; -1 if unlimited.
        is_world_process_zero: whether this is the process that logs.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0
    num_train_epochs: int = -1
    is_world_process_zero: bool = True


class RewardLog:
    """The log of one call of a reward function on ``count`` completions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.extra: dict[str, list[Plain]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Record a value per completion; further calls for the same column append to it."""
        self.extra.setdefault(str(column), []).extend(map(as_plain, values))

    def log_metric(self, name: str, value: float) -> None:
        """Record a number; numbers of the same name are averaged over an iteration, without NaN."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def arguments(self) -> dict[str, Any]:
        """Return the two logging functions, by the names of a reward function's parameters."""
        return {"log_extra": self.log_extra, "log_metric": self.log_metric}

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "RewardLog | None":
        """Return the log that a call's arguments write to; None if they include no log function."""
        methods = (arguments.get("log_extra"), arguments.get("log_metric"))
        return next((method.__self__ for method in methods if method is not None), None)

    def require_complete(self) -> None:
        """Refuse columns that do not have one value per completion.

        Raises:
            ValueError: for the first such column.
        """
        for column, values in self.extra.items():
            if len(values) != self.count:
                raise ValueError(
                    f"log_extra({column!r}) was given {len(values)} values for {self.count} "
                    "completions"
                )

    def clear(self) -> None:
        """Clear the log before the function is called again."""
        self.extra.clear()
        self.metrics.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return the log as primitives."""
        return {"extra": self.extra, "metrics": self.metrics}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add what another process logged, given as its :meth:`to_dict`."""
        for column, values in record["extra"].items():
            self.log_extra(column, values)
        for name, values in record["metrics"].items():
            for value in values:
                self.log_metric(name, value)

    def join(self, parts: Sequence["RewardLog"]) -> None:
        """Merge one log per completion into this one; a completion without a column gets None."""
        for column in dict.fromkeys(column for part in parts for column in part.extra):
            self.log_extra(column, [part.extra.get(column, [None])[0] for part in parts])
        for part in parts:
            for name, values in part.metrics.items():
                self.log_metric(name, mean(values))


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite numbers; nan if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def as_plain(value: Any) -> Plain:
    """Convert a value, however nested, to a form that every record of a rollout can hold.

    Arrays become lists; keys, and values of any other type, become strings.
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's and torch's, of which a number is one
        return as_plain(value.tolist())
    # Also numpy's float64, which is a float that no checkpoint loads.
    return float(value) if isinstance(value, float) and math.isfinite(value) else str(value)
