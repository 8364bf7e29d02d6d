"""Peek: a small batch of rollouts for inspection."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

from tensordict import TensorDict

from lightning_rl.rollout import Rollout

_WIDEST = 40
"""Maximum characters per cell of the printed table; the rollouts hold the whole text."""


@dataclass(frozen=True)
class Peek:
    """A small batch as rollouts, as tensors and as a table, which ``print`` shows.

    Args:
        rollouts: the generated and graded rollouts.
        batch: the same rollouts packed as for a training step.
        columns: names of the table's columns.
        rows: rows of the table, one per rollout.
        markdown: the table in Markdown.
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
        """Show the table in a notebook."""
        return self.markdown


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
