"""Records: the entries of a run's ledger, replayed from the first to the last."""

from dataclasses import dataclass, field
from typing import Any, Self

from lightning_rl.data.rollouts.ledger import Entry
from lightning_rl.data.rollouts.seals import Seal


@dataclass
class Records:
    """The ledger of a run, and the files that differ from it.

    ``begins`` are the starts of the run, ``iterations`` the valid entries by version: of an
    iteration that was trained again after a resume, the last one counts. ``twice`` are the versions
    that were trained twice, ``otherwise`` those of them that resulted in different weights.
    ``files`` are the results as last recorded, since the run's last start.
    """

    begins: list[Entry] = field(default_factory=list)
    iterations: dict[int, Entry] = field(default_factory=dict)
    metrics: list[tuple[int, str]] = field(default_factory=list)
    checkpoints: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, Seal] = field(default_factory=dict)
    end: Entry | None = None
    """The last entry, if it is the end of the run: nothing may follow it."""
    sealed: set[str] = field(default_factory=set)
    """All results that the ledger ever recorded; empty: it is of a release that recorded none."""
    twice: set[int] = field(default_factory=set)
    otherwise: set[int] = field(default_factory=set)
    environments: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The environment in which each version was trained."""
    entries: int = 0
    changed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Files that are not in the ledger, and so cannot be verified."""

    @classmethod
    def of(cls, entries: list[Entry]) -> Self:
        """Return what the entries of a ledger say, from the first to the last."""
        records = cls(entries=len(entries))
        dropped: dict[int, str] = {}
        for entry in entries:
            kind, version = entry["kind"], entry.get("version", 0)
            if kind == "begin":
                records.begins.append(entry)
                for later in [v for v in records.iterations if v > version]:
                    dropped[later] = records.iterations.pop(later)["weights_after"]
                # A run from the start forgets the one before it, as RerunLog.forget_after does.
                records.metrics = [pair for pair in records.metrics if pair[0] <= version > 0]
                records.files = {}  # what it goes on with it may cut first
            elif kind == "checkpoint":
                records.checkpoints[entry["file"]] = entry["sha256"]
            elif kind in ("iteration", "metrics"):
                records.metrics.append((version, entry["metrics"]))
            records.files |= entry.get("files", {})
            records.sealed |= entry.get("files", {}).keys()
            records.end = entry if kind == "end" else None
            if kind == "iteration":
                records.iterations[version] = entry
                records.environments[version] = records.begins[-1]["environment"]
                if version in dropped:
                    records.twice.add(version)
                    if dropped[version] != entry["weights_after"]:
                        records.otherwise.add(version)
        return records
