"""Arguments of TRL's reward functions besides data: progress of training, and logging."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rollout import Rollout

Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"] | None
"""Types that every record of a rollout can hold."""


@dataclass(frozen=True)
class TrainerState:
    """Progress of training, under the names of transformers' class; a step is an iteration here.

    Args:
        global_step: iterations before the one that is graded.
        max_steps: iterations of the whole run; -1 without an end.
        epoch: ``global_step`` in epochs.
        num_train_epochs: epochs of the whole run; -1 without an end.
        is_world_process_zero: whether this is the process that logs.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0
    num_train_epochs: int = -1
    is_world_process_zero: bool = True


class RewardLog:
    """The log of one call of a reward function, for ``count`` completions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.extra: dict[str, list[Plain]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a value per completion; several calls for one column follow one another."""
        self.extra.setdefault(str(column), []).extend(map(as_plain, values))

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number; all of one name are averaged over an iteration, NaN left out."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def arguments(self) -> dict[str, Any]:
        """The two functions under the names by which reward functions ask for them."""
        return {"log_extra": self.log_extra, "log_metric": self.log_metric}

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "RewardLog | None":
        """The log that a call's arguments write to; None if the function asked for none."""
        methods = (arguments.get("log_extra"), arguments.get("log_metric"))
        return next((method.__self__ for method in methods if method is not None), None)

    def require_complete(self) -> None:
        """Refuse columns that do not have one value per completion.

        Raises:
            ValueError: naming the first of them.
        """
        for column, values in self.extra.items():
            if len(values) != self.count:
                raise ValueError(
                    f"log_extra({column!r}) was given {len(values)} values for {self.count} "
                    "completions"
                )

    def clear(self) -> None:
        """Forget everything, before the function is called again."""
        self.extra.clear()
        self.metrics.clear()

    def to_dict(self) -> dict[str, Any]:
        """The log, as primitives."""
        return {"extra": self.extra, "metrics": self.metrics}

    def add(self, record: Mapping[str, Any]) -> None:
        """Log what another process did, from its :meth:`to_dict`."""
        for column, values in record["extra"].items():
            self.log_extra(column, values)
        for name, values in record["metrics"].items():
            for value in values:
                self.log_metric(name, value)

    def join(self, parts: Sequence["RewardLog"]) -> None:
        """Log what was logged for each completion apart; a column that one lacks is None there."""
        for column in dict.fromkeys(column for part in parts for column in part.extra):
            self.log_extra(column, [part.extra.get(column, [None])[0] for part in parts])
        for part in parts:
            for name, values in part.metrics.items():
                self.log_metric(name, mean(values))

    def write_to(self, rollouts: Sequence[Rollout]) -> None:
        """Set ``extra`` of the rollouts whose completions were graded, in order."""
        for column, values in self.extra.items():
            for rollout, value in zip(rollouts, values, strict=True):
                rollout.extra[column] = value


def mean(values: Sequence[float]) -> float:
    """Mean of the numbers that are finite; nan without any."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def as_plain(value: Any) -> Plain:
    """The value, however nested, as every record of a rollout can hold it.

    Arrays become lists, keys text, and what fits nothing else text, too.
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
