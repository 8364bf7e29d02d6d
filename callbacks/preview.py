"""PreviewTable: readable samples of rollouts, of which none is overwritten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from PIL import Image

from lightning_rl.callbacks.recorder import RolloutSelection
from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import packed_rows
from lightning_rl.data.rollouts.pictures import pictures_in
from lightning_rl.data.rollouts.rows import calls_as_text, turns_as_text, turns_of
from lightning_rl.data.rollouts.token_texts import mark_of, text_with_marks
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Picture, Prompt, Rollout, as_text
from lightning_rl.vision.loading import decode

Row = tuple[Any, ...]
"""Text, numbers, :class:`Shown` pictures, and None for missing values."""
SIDE = 256
"""Largest side in pixels; larger pictures are scaled down."""


@dataclass(frozen=True)
class Shown:
    """The pictures that a rollout read, as one cell of a table; their sizes as text."""

    pictures: tuple[Picture, ...]

    def __str__(self) -> str:
        return " ".join(mark_of(one.width, one.height) for one in self.pictures)

    def image(self) -> Image.Image:
        """Return all pictures side by side in RGB, none larger than ``SIDE`` pixels."""
        images = [decode(one) for one in self.pictures]
        for one in images:
            one.thumbnail((SIDE, SIDE))
        row = Image.new("RGB", (sum(i.width for i in images), max(i.height for i in images)))
        left = 0
        for one in images:
            row.paste(one, (left, 0))
            left += one.width
        return row


@singledispatch
def log_table(
    logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    """Show a table of an iteration; does nothing if the logger cannot show tables.

    TensorBoard is supported, and loggers with the same ``add_text``; pictures, which a text cell
    cannot hold, follow as ``add_image`` under the row's number. For another class of logger
    register a function: ``@log_table.register``.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_text"):
        experiment.add_text(name, as_markdown(columns, rows), iteration)
    if not hasattr(experiment, "add_image"):
        return
    for number, row in enumerate(rows, 1):
        for shown in (cell for cell in row if isinstance(cell, Shown)):
            pixels = np.asarray(shown.image())
            experiment.add_image(f"{name}/{number}", pixels, iteration, dataformats="HWC")


@log_table.register
def _(
    logger: WandbLogger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    import wandb

    def shown(cell: Any) -> Any:
        is_shown = isinstance(cell, Shown)
        return wandb.Image(cell.image(), caption=str(cell)) if is_shown else cell

    # Rewards may log a number for one rollout, and text for another.
    data = [[shown(cell) for cell in row] for row in rows]
    table = wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
    logger.log_metrics({name: table}, step=iteration)  # type: ignore[dict-item]


@log_table.register
def _(
    logger: MLFlowLogger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    plain = [[str(cell) if isinstance(cell, Shown) else cell for cell in row] for row in rows]
    cells = {column: [row[i] for row in plain] for i, column in enumerate(columns)}
    # A file for each iteration: MLflow would read all of one, and write it anew, to add to it.
    file = f"{name}/iteration_{iteration:06d}.json"
    logger.experiment.log_table(logger.run_id, cells, file)


def as_markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Format a table in Markdown; pipes and line breaks in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


@configurable
class PreviewTable(RolloutSelection):
    """Appends some rollouts of each iteration to ``rollouts.jsonl`` in the run directory.

    They are spread evenly over the rewards, from worst to best. TensorBoard, W&B and MLflow get
    them as a table, one per iteration.

    Args:
        num_rollouts: rollouts per iteration.
        every_n_iterations: how often to record.
    """

    NAME = "rollouts.jsonl"

    def __init__(self, num_rollouts: int = 8, every_n_iterations: int = 1) -> None:
        if num_rollouts < 1 or every_n_iterations < 1:
            raise ConfigError(
                f"PreviewTable(num_rollouts={num_rollouts}, every_n_iterations="
                f"{every_n_iterations}): both must be >= 1"
            )
        super().__init__(every_n_iterations)
        self.num_rollouts = num_rollouts

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        module = self.rollout_module_of(pl_module)
        iteration = module.present_iteration
        if not self.is_due(iteration) or not trainer.is_global_zero:
            return
        chosen = self.choose(rollouts)
        self.write(trainer, iteration, chosen)
        decode = module.tokenizer.decode
        table = preview_table(chosen, lambda ids: str(decode(ids)))
        for logger in trainer.loggers:
            log_table(logger, "rollouts", *table, iteration)

    def choose(self, rollouts: list[Rollout]) -> list[Rollout]:
        return spread(rollouts, self.num_rollouts)


def spread(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Return ``count`` rollouts at even ranks of reward, worst first; those without one lead."""
    ranked = sorted(rollouts, key=lambda r: float("-inf") if r.reward is None else r.reward)
    count = min(count, len(ranked))
    if count < 2:
        return ranked[-count:] if count else []
    return [ranked[i * (len(ranked) - 1) // (count - 1)] for i in range(count)]


def preview_table(
    rollouts: Sequence[Rollout], decode: Callable[[list[int]], str] | None = None
) -> tuple[list[str], list[Row]]:
    """Return columns, and a row per rollout; columns that rewards logged come after the parts.

    An interaction by a protocol shows each turn; another rollout of several rows shows each call,
    with the end of its prompt. If there are several prompt sets, their names come first; if there
    are pictures, those of each rollout follow its prompt. With ``decode``, a chat is shown as the
    model reads it, including what its template adds, such as a system message.
    """
    several = any(r.prompt.set for r in rollouts)
    seen = [tuple(pictures_in([rollout])) for rollout in rollouts]
    extra = list(dict.fromkeys(column for r in rollouts for column in r.extra))
    rows: list[Row] = []
    for r, pictures in zip(rollouts, seen, strict=True):
        parts = ", ".join(f"{name} {score}" for name, score in r.reward_parts.items())
        end = r.error or f"{r.status.value}, {r.finish_reason}, {r.length} tokens"
        end += f" in {len(packed_rows([r]))} rows" if len(r.rows) > 1 and not r.error else ""
        end += f", branched off after {r.fork.calls} calls" if r.fork and not r.error else ""
        # One column of a logger's table cannot hold both lists and numbers.
        told = [r.extra.get(column) for column in extra]
        logged = [str(value) if isinstance(value, list | dict) else value for value in told]
        said = _told(r, decode or str)
        name = [r.prompt.set] if several else []
        shown = [Shown(pictures) if pictures else None] if any(seen) else []
        text = _read(r.prompt, decode)
        rows.append((*name, text, *shown, said, r.reward, parts, *logged, end))
    first = ["set"] if several else []
    second = ["pictures"] if any(seen) else []
    return [*first, "prompt", *second, "completion", "reward", "parts", *extra, "end"], rows


def _read(prompt: Prompt, decode: Callable[[list[int]], str] | None) -> str:
    if decode is None or isinstance(prompt.prompt, str):
        return as_text(prompt.prompt)
    marks = [(place, mark_of(shown.width, shown.height)) for place, shown in prompt.placed]
    return text_with_marks(decode, prompt.token_ids, marks, tail=len(prompt.token_ids))


def _told(rollout: Rollout, decode: Callable[[list[int]], str]) -> str:
    if turns := turns_of(rollout.completion):
        return turns_as_text(turns)
    return calls_as_text(rollout, decode) if len(rollout.rows) > 1 else as_text(rollout.completion)
