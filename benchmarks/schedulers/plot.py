"""Draw the figure of `benchmarks.schedulers`."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.schedulers.simulated import (
    COLOCATED,
    HEADLINE,
    LENGTHS,
    SCHEDULERS,
    STREAMED,
    TRAIN_SHARES,
    Row,
    find,
    speed,
)
from benchmarks.support.colours import INK, PALE

COLORS = {"fixed": "#9aa5b1", "lognormal": "#2f6fb0", "pareto": "#d9822b"}
AGES = ("#c9d8e8", "#93b5d6", "#5d92c4", "#2f6fb0", "#174a7e")
LINES = {
    "Async S=4": "#174a7e",
    "Async S=1": "#5d92c4",
    "OneStepOff": "#7a5fa8",
    STREAMED: "#b03a5b",
    "Partial 1.5": "#3a9474",
    "TailBatching 1.25": "#d9822b",
    COLOCATED: "#9aa5b1",
}


def draw(rows: list[Row], path: str) -> None:
    """Draw speed, where the engine's time goes, staleness, and how speed depends on the load."""
    figure = Figure(figsize=(12, 8.5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _speeds(axes[0, 0], rows)
    _engine_time(axes[0, 1], rows)
    _staleness(axes[1, 0], rows)
    _loads(axes[1, 1], rows)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(length=0, colors=INK)
        panel.title.set(fontsize=11, fontweight="bold", color=INK)
        panel.title.set_ha("left")
        panel.title.set_x(0)
    figure.savefig(path, dpi=130)


def _name_rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _legend(axes: Axes) -> None:
    """Place the legend above the axes, at their right end."""
    axes.legend(
        frameon=False, ncols=5, loc="lower right", bbox_to_anchor=(1.02, 0.98), fontsize=9,
        handlelength=1, columnspacing=1.2,
    )  # fmt: skip


def _speeds(axes: Axes, rows: list[Row]) -> None:
    names = [name for name in SCHEDULERS if name != "Sync"]
    for y, name in enumerate(names):
        speeds = {kind: speed(find(rows, kind, HEADLINE[1], name), rows) for kind in LENGTHS}
        axes.hlines(y, min(speeds.values()), max(speeds.values()), color=PALE, linewidth=3)
        for kind, value in speeds.items():
            axes.plot(value, y, "o", color=COLORS[kind], label=kind if y == 0 else None)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    _name_rows(axes, names)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(title="lengths", frameon=False, loc="lower right")
    axes.set_xlabel("trained tokens per second, relative to Sync")
    axes.set_title("Speed, where training takes 30% of Sync's time")


def _engine_time(axes: Axes, rows: list[Row]) -> None:
    names = list(SCHEDULERS)
    for y, name in enumerate(names):
        row = find(rows, *HEADLINE, name)
        trained = 1 - row.engine_bubble
        wasted = trained / (1 - row.wasted) * row.wasted
        parts = (("trained tokens", trained, COLORS["lognormal"]),
                 ("aborted tokens", wasted, COLORS["pareto"]),
                 ("empty", 1 - trained - wasted, PALE))  # fmt: skip
        left = 0.0
        for label, width, color in parts:
            axes.barh(y, width, left=left, color=color, label=label if y == 0 else None, height=0.7)
            left += width
    _name_rows(axes, names)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    _legend(axes)
    axes.set_xlabel("share of the engine's slot-time (lognormal)")
    axes.set_title("Engine time")


def _staleness(axes: Axes, rows: list[Row]) -> None:
    every = {name: find(rows, *HEADLINE, name) for name in SCHEDULERS}
    names = [name for name, row in every.items() if row.staleness_max > 0]
    for y, name in enumerate(names):
        left = 0.0
        for age, color in enumerate(AGES):
            width = every[name].staleness.get(age, 0.0)
            label = str(age) if y == 0 else None
            axes.barh(y, width, left=left, color=color, label=label, height=0.7)
            left += width
    _name_rows(axes, names)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    _legend(axes)
    axes.set_xlabel("share of the trained tokens, by versions they are behind (lognormal)")
    axes.set_title("Staleness")


def _loads(axes: Axes, rows: list[Row]) -> None:
    ends = []
    for name, color in LINES.items():
        speeds = [speed(find(rows, HEADLINE[0], share, name), rows) for share in TRAIN_SHARES]
        axes.plot(TRAIN_SHARES, speeds, ".-", color=color, linewidth=2, markersize=9)
        ends.append((speeds[-1], name, color))
    place = 0.0
    for end, name, color in sorted(ends):
        place = max(end, place + 0.09)  # names do not cover each other
        axes.text(TRAIN_SHARES[-1] + 0.012, place, name, color=color, va="center", fontsize=9)
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    axes.set_xlim(0.08, 0.66)
    axes.set_xticks(TRAIN_SHARES)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="y", alpha=0.25)
    axes.set_xlabel("share of Sync's time that is training (lognormal)")
    axes.set_ylabel("relative to Sync")
    axes.set_title("Speed by load")
