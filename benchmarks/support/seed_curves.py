"""Draw figures of several seeds: curves over iterations, and each task before and after."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.support.colours import INK, PALE

BEFORE, AFTER = "#9aa5b1", "#2f6fb0"
SEEDS = ("#2f6fb0", "#d9822b", "#3a9474")


def draw(
    runs: list[dict[str, Any]], tasks: dict[str, dict[str, float]], path: str, title: str
) -> None:
    """Draw accuracy over iterations, a line per seed; each task before and after, seeds' mean.

    ``title`` says what the curves show.
    """
    figure = Figure(figsize=(12, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2)
    _curves(curves, runs, title)
    _bars(bars, tasks, len(runs))
    for panel in (curves, bars):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(length=0, colors=INK)
    figure.savefig(path, dpi=130)


def _curves(axes: Axes, runs: list[dict[str, Any]], title: str) -> None:
    for run, color in zip(runs, SEEDS, strict=False):
        label = f"seed {run['seed']}"
        axes.plot(run["iterations"], run["accuracy"], ".-", color=color, label=label)
    axes.margins(y=0.4)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    axes.set_xlabel("iterations of GRPO")
    _title(axes, title)


def _bars(axes: Axes, tasks: dict[str, dict[str, float]], seeds: int) -> None:
    for y, end in enumerate(tasks.values()):
        axes.hlines(y, end["before"], end["after"], color=PALE, linewidth=3)
        for when, color in (("before", BEFORE), ("after", AFTER)):
            axes.plot(end[when], y, "o", color=color, label=when if y == 0 else None)
    axes.set_yticks(range(len(tasks)), list(tasks))
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    _title(axes, f"Each task, mean of {seeds} seeds" if seeds > 1 else "Each task")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=11, fontweight="bold", color=INK, loc="left")
