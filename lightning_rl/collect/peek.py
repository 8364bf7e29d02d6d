"""Peek: a small batch of rollouts, to look at."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

from tensordict import TensorDict

from lightning_rl.rollout import Rollout

_WIDEST = 40
"""Characters of a cell of the text; the rollouts hold all of it."""


@dataclass(frozen=True)
class Peek:
    """A small batch, as text, as a table and as tensors. ``print`` shows the table.

    Args:
        rollouts: as they were generated and graded.
        batch: the same packed, which is what a training step gets.
        columns: names of the table's columns.
        rows: of the table, one for each rollout.
    """

    rollouts: list[Rollout]
    batch: TensorDict
    columns: list[str]
    rows: list[tuple[Any, ...]]
    markdown: str

    def __str__(self) -> str:
        lines = [[_cell(value) for value in line] for line in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        tokens = self.batch["tokens", "input_ids"]
        held = f"{len(self.rollouts)} rollouts, packed in {len(tokens):,} tokens"
        return "\n".join(chain(table, [held]))

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        """In a notebook."""
        return self.markdown


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
