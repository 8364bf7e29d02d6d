"""The figure of `benchmarks.scaling_simulated`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.scaling_simulated.runs import ASYNC, ASYNC_SHARED, ONE_STEP, SYNC, Row
from benchmarks.support.colours import INK, PALE

MODES = {
    SYNC.name: ("#9aa5b1", "-"),
    ONE_STEP.name: ("#7a5fa8", "-"),
    ASYNC.name: ("#2f6fb0", "-"),
    ASYNC_SHARED.name: ("#2f6fb0", ":"),
}
MODELS = {"8B": "#93b5d6", "32B": "#2f6fb0", "235B-A22B": "#174a7e"}


def draw(rows: Sequence[Row], syncs: dict[str, dict[str, float]], limit: int, path: Path) -> None:
    """Iterations by GPUs, of the smallest and the largest of ``MODELS``, and syncs by transport."""
    with matplotlib.rc_context({"svg.hashsalt": "scaling", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12.5, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1, 1, 1.15)})
        for panel, model in zip(panels, ("8B", "235B-A22B"), strict=False):
            _iterations(panel, [r for r in rows if r.model == model and r.limit == limit])
            panel.set_title(f"{model}: seconds per iteration")
        panels[0].legend(frameon=False, fontsize=8.5, loc="lower left")
        _syncs(panels[2], syncs)
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(which="both", length=0, colors=INK)
            panel.title.set(fontsize=11, fontweight="bold", color=INK)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _iterations(axes: Axes, rows: Sequence[Row]) -> None:
    for mode, (color, style) in MODES.items():
        points = [(row.gpus, row.iteration) for row in rows if row.mode == mode]
        if points:
            axes.plot(*zip(*points, strict=True), style, marker=".", color=color, label=mode)
    first = min(rows, key=lambda row: row.gpus)
    last = max(row.gpus for row in rows)
    ideal = [(n, first.iteration * first.gpus / n) for n in (first.gpus, last)]
    axes.plot(*zip(*ideal, strict=True), color=PALE, linewidth=1, zorder=0)
    axes.text(last, ideal[-1][1], "ideal", ha="right", va="bottom", color="#9aa5b1", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({row.gpus for row in rows})
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
    axes.set_xlabel("GPUs, the same batch")
    axes.grid(axis="y", alpha=0.25)


def _syncs(axes: Axes, syncs: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(syncs.values())))
    height = 0.8 / len(MODELS)
    for place, (model, color) in enumerate(MODELS.items()):
        for y, name in enumerate(names):
            top, seconds = y + (place - 1) * height, syncs[model][name]
            label = model if y == 0 else None
            axes.barh(top, seconds, height, left=0, color=color, label=label)
            axes.text(seconds * 1.1, top, f"{seconds:.2g}" if seconds < 100 else f"{seconds:.0f}",
                      va="center", fontsize=7.5, color=INK)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.1, 9000)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", bbox_to_anchor=(1.02, 0.75))
    axes.set_title("A sync's seconds, 8 replicas")
