"""The rerun log: every rollout that a run was trained on, and the outcome of each iteration."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightning_rl.data.rollouts.parquet import ParquetRollouts, write_part
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.rundir import append, write_whole

FILE = "iteration-{:06d}-{:03d}.parquet"
"""The name of the file of an iteration and a rank."""


@dataclass(frozen=True)
class Outcome:
    """A version of the weights, in a form that can be compared with another.

    ``weights`` holds the digest of each tensor of the policy (:mod:`lightning_rl.run.digest`),
    ``metrics`` the row of the iteration that made it, ``ranks`` the number of training processes.
    """

    version: int
    weights: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: int = 1


class RerunLog:
    """The folder ``rerun`` of a run directory.

    ``iteration-000012-000.parquet`` holds the rollouts that iteration 12 was trained on, by rank
    and in order (a rollout file, as ``lightning-rl rollouts`` reads it); ``versions.jsonl`` holds
    an :class:`Outcome` per line.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "rerun"
        self._versions = self.path / "versions.jsonl"

    def write_rollouts(self, iteration: int, rank: int, rollouts: list[Rollout]) -> None:
        """Store an iteration's rollouts atomically, replacing earlier ones."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_part(self._file(iteration, rank), rollouts, iteration)

    def write_outcome(self, outcome: Outcome) -> None:
        """Append an outcome.

        Raises:
            DiskError: if it cannot be written; the file is unchanged then.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        append(self._versions, _line(outcome))

    def forget_after(self, version: int) -> None:
        """Remove what was recorded after a version, from which the run is now resumed."""
        for file in self._files():
            if _iteration_of(file) > version:
                file.unlink()
        kept = [o for o in self.lines() if o.version <= version] if version > 0 else []
        if self._versions.exists():
            write_whole(self._versions, "".join(map(_line, kept)))

    def rollouts(self, iteration: int, rank: int = 0) -> list[Rollout]:
        """Return the rollouts that an iteration was trained on, on one rank.

        Raises:
            DataError: if they are missing or damaged.
        """
        file = self._file(iteration, rank)
        if not file.exists():
            whose = f" of rank {rank}" if rank else ""
            raise DataError(
                f"{self.path} holds no rollouts{whose} of iteration {iteration}, only of "
                f"{self.span()}; RerunRecorder records those that are trained on"
            )
        return [recorded.rollout for recorded in ParquetRollouts(file).read()]

    def files_of(self, iteration: int) -> list[Path]:
        """Return the files of an iteration's rollouts, one per rank."""
        return [file for file in self._files() if _iteration_of(file) == iteration]

    def iterations(self) -> set[int]:
        """Return the iterations whose rollouts the log holds."""
        return {_iteration_of(file) for file in self._files()}

    @property
    def began(self) -> bool:
        """Return True if the log holds the weights that the run began with."""
        return any(line.version == 0 for line in self.lines())

    def span(self) -> str:
        """Return in words which iterations the log holds."""
        held = sorted(self.iterations())
        return f"iterations {held[0]} to {held[-1]}" if held else "no iteration"

    def others(self) -> list[Path]:
        """Return other files in the folder, besides those of rollouts and outcomes."""
        own = {*self._files(), self._versions}
        return sorted(path for path in self.path.glob("*") if path not in own)

    def all_rollouts(self) -> Iterator[Rollout]:
        """Yield the rollouts of all iterations and ranks."""
        for file in self._files():
            yield from (recorded.rollout for recorded in ParquetRollouts(file).read())

    def outcomes(self) -> dict[int, Outcome]:
        """Return outcomes by version; metrics of a version with several lines are merged."""
        result: dict[int, Outcome] = {}
        for new in self.lines():
            known = result.get(new.version, new)
            result[new.version] = replace(new, metrics=known.metrics | new.metrics)
        return result

    def lines(self) -> Iterator[Outcome]:
        """Yield the outcome of each line.

        An incomplete line is skipped, and so is a damaged one, with a warning.
        """
        if not self._versions.exists():
            return
        for number, line in enumerate(self._versions.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue
            try:
                outcome = Outcome(**json.loads(line))
                kinds = (type(outcome.version), type(outcome.weights), type(outcome.metrics))
                if kinds != (int, dict, dict):
                    raise TypeError("it is not an outcome")
                yield outcome
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                warnings.warn(
                    f"{self._versions}:{number} is damaged and ignored ({error}): "
                    f"{line[:60].decode(errors='replace')!r}",
                    stacklevel=2,
                )

    def _file(self, iteration: int, rank: int) -> Path:
        return self.path / FILE.format(iteration, rank)

    def _files(self) -> list[Path]:
        files = (file for file in self.path.glob("*.parquet") if _NAMED.fullmatch(file.name))
        return sorted(files, key=lambda file: (_iteration_of(file), file.name))


_NAMED = re.compile(r"iteration-([0-9]{1,9})-[0-9]{1,9}\.parquet")


def _line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome)) + "\n"


def _iteration_of(file: Path) -> int:
    named = _NAMED.fullmatch(file.name)
    assert named is not None
    return int(named[1])


def first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """Return the first name whose values differ, or that only one has; None if all are equal."""
    for name in [*one, *(n for n in other if n not in one)]:
        if one.get(name) != other.get(name):
            return name
    return None
