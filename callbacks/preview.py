"""PreviewTable: rollouts that a person can read, none of them overwritten."""

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_rl.callbacks.recorder import RolloutSelection
from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import packed_rows
from lightning_rl.data.rollouts.rows import calls_as_text
from lightning_rl.data.rollouts.turns import turns_as_text, turns_of
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Rollout, as_text

Row = tuple[Any, ...]
"""Text, numbers, and None for what is not there."""


@singledispatch
def log_table(
    logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Row], iteration: int
) -> None:
    """Show a table of an iteration; does nothing where a logger has no way to.

    It supports TensorBoard, and loggers with the same ``add_text``. For another
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


@configurable
class PreviewTable(RolloutSelection):
    """Appends some rollouts of each iteration to ``rollouts.jsonl`` in the run directory.

    They are spread evenly over the rewards, from worst to best. TensorBoard, W&B and MLflow get the
    same as a table, one per iteration.

    Args:
        num_rollouts: how many per iteration.
        every_n_iterations: how often.
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
    """``count`` rollouts at even ranks of reward, worst first; those without a reward lead."""
    ranked = sorted(rollouts, key=lambda r: float("-inf") if r.reward is None else r.reward)
    count = min(count, len(ranked))
    if count < 2:
        return ranked[-count:] if count else []
    return [ranked[i * (len(ranked) - 1) // (count - 1)] for i in range(count)]


def _shown(value: Any) -> Any:
    """The value as loggers' tables take it: one column cannot hold lists beside numbers."""
    return str(value) if isinstance(value, list | dict) else value


def preview_table(
    rollouts: Sequence[Rollout], decode: Callable[[list[int]], str] = str
) -> tuple[list[str], list[Row]]:
    """Columns, and a row per rollout; columns that rewards logged come after the parts.

    Of an interaction by a protocol each turn is told; of another rollout of several rows each call,
    with the end of its prompt. Where there are several prompt sets, their names come first.
    """
    several = any(r.prompt.set for r in rollouts)
    extra = list(dict.fromkeys(column for r in rollouts for column in r.extra))
    rows: list[Row] = []
    for r in rollouts:
        parts = ", ".join(f"{name} {score}" for name, score in r.reward_parts.items())
        end = r.error or f"{r.status.value}, {r.finish_reason}, {r.length} tokens"
        end += f" in {len(packed_rows([r]))} rows" if len(r.rows) > 1 and not r.error else ""
        end += f", branched off after {r.fork.calls} calls" if r.fork and not r.error else ""
        logged = [_shown(r.extra.get(column)) for column in extra]
        said = _told(r, decode)
        name = [r.prompt.set] if several else []
        rows.append((*name, as_text(r.prompt.prompt), said, r.reward, parts, *logged, end))
    first = ["set"] if several else []
    return [*first, "prompt", "completion", "reward", "parts", *extra, "end"], rows


def _told(rollout: Rollout, decode: Callable[[list[int]], str]) -> str:
    if turns := turns_of(rollout.completion):
        return turns_as_text(turns)
    return calls_as_text(rollout, decode) if len(rollout.rows) > 1 else as_text(rollout.completion)
