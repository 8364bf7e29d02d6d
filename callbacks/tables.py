"""A table of rollouts, in whatever logger can show one."""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

Row = tuple[Any, ...]
"""Text, numbers, and None for what is not there."""


@singledispatch
def log_table(
    logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    """Show a table of an iteration; does nothing where a logger has no way to.

    As it stands it is for TensorBoard, and loggers with an ``add_text`` like its own. For another
    class of logger register a function: ``@log_table.register``.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_text"):
        experiment.add_text(name, as_markdown(columns, rows), iteration)


@log_table.register
def _(
    logger: WandbLogger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    import wandb

    # Rewards may log a number for one rollout, and text for another.
    data = [list(row) for row in rows]
    table = wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
    logger.log_metrics({name: table}, step=iteration)  # type: ignore[dict-item]


@log_table.register
def _(
    logger: MLFlowLogger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    cells = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    # A file for each iteration: MLflow would read all of one, and write it anew, to add to it.
    file = f"{name}/iteration_{iteration:06d}.json"
    logger.experiment.log_table(logger.run_id, cells, file)


def as_markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """The table in Markdown; pipes and line breaks in cells survive."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
