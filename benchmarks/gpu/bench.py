"""Provide a check with its device, its sizes, and a record for its results."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAST_LINES = 15
"""The lines of an error or of a process's output that a record keeps."""


class Skipped(Exception):
    """The check cannot be made here, for a reason that is not a fault."""


class Bench:
    """The place where a check runs, and its record.

    Args:
        device: ``cuda``, or ``cpu`` for a trial of the check itself at a tiny size.
        scratch: a directory that all checks of a run share.
        record: the file that figures and outcome are written to at once, so that they are there
            whatever ends the process.
    """

    def __init__(self, device: str, scratch: Path, record: Path) -> None:
        self.device = device
        self.scratch = scratch
        self.figures: dict[str, Any] = {}
        self.faults: list[str] = []
        self._record = record

    @property
    def tiny(self) -> bool:
        """Tell whether this is a trial, whose sizes should let a check take a second."""
        return self.device == "cpu"

    def note(self, figures: dict[str, Any] | None = None, **more: Any) -> None:
        """Add to the check's figures: numbers, texts, flags and dictionaries of them by name."""
        self.figures |= {name: rounded(value) for name, value in ((figures or {}) | more).items()}
        self.write(None)

    def require(self, condition: object, message: str) -> None:
        """Fail the check unless this holds, but first go on."""
        if not condition:
            self.faults.append(message)
            self.write(None)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Make one of several parts of a check: when it fails, the others are still made."""
        try:
            yield
        except Skipped:
            raise
        except Exception:
            self.faults.append(f"{name}: {last_lines(traceback.format_exc())}")
            self.write(None)

    def write(self, outcome: str | None, error: str | None = None) -> None:
        """Put the record into its file; ``outcome`` None: not over yet."""
        error = error or "\n".join(self.faults) or None
        partial = self._record.with_suffix(".partial")
        record = {"outcome": outcome, "figures": self.figures, "error": error}
        partial.write_text(json.dumps(record))
        partial.replace(self._record)


def last_lines(text: str) -> str:
    """Return the end of a text, where an error says what it is."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def rounded(value: Any) -> Any:
    """Round floats to four digits, in dictionaries too."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
