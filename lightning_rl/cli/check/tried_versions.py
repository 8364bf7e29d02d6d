"""Versions of packages that were tried together, and the nearest of them to this installation.

The rows stand in ``tried_versions.jsonl``, to which ``benchmarks.versions`` adds what a test run
has tried.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rl.cli.check.doctor_gpu import Check

FILE = Path(__file__).with_name("tried_versions.jsonl")


@dataclass(frozen=True)
class Versions:
    """Packages that were tried together.

    ``device`` is ``cpu`` or ``cuda``, ``ran`` names what was run by its newest ``date``. Versions
    have no local part, so that ``2.13.0`` stands for ``2.13.0+cpu`` too; vLLM's is "" without one.
    """

    device: str
    torch: str
    vllm: str
    transformers: str
    ran: tuple[str, ...] = ()
    date: str = ""

    @property
    def packages(self) -> tuple[str, str, str]:
        """The versions alone."""
        return self.torch, self.vllm, self.transformers

    def __str__(self) -> str:
        named = zip(("torch", "vLLM", "transformers"), self.packages, strict=True)
        return ", ".join(f"{name} {version}" for name, version in named if version)


def public(version: str | None) -> str:
    """Return a version without its local part, such as ``+cpu``; "" for None."""
    return (version or "").partition("+")[0]


def read_tried(file: Path = FILE) -> list[Versions]:
    """Return the rows, oldest first."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Versions(**{**row, "ran": tuple(row["ran"])}) for row in rows]


def nearest(here: Versions, tried: Sequence[Versions]) -> Versions:
    """Return the row that shares the device and then the most versions; the newest of several."""

    def shared(row: Versions) -> tuple[bool, int, str]:
        equal = [a == b for a, b in zip(row.packages, here.packages, strict=True)]
        return row.device == here.device, sum(equal), row.date

    return max(tried, key=shared)


def check_tried(here: Versions, tried: Sequence[Versions]) -> Check:
    """Check that these versions were tried together; otherwise name the nearest that were."""
    row = nearest(here, tried)
    what = f"{', '.join(row.ran)} on {row.device}, {row.date}"
    if (row.device, row.packages) == (here.device, here.packages):
        return Check("versions", f"tried together: {what}")
    fix = f"the nearest that were: {row} ({what})"
    return Check("versions", str(here), "not tried together yet", fix)
