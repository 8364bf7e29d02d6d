"""Draw the figure of `benchmarks.matrix_games`."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.support.colours import INK

COLORS = {"Simultaneous": "#9aa5b1", "SPG": "#3a9474", "LOLA": "#d9822b", "SOS": "#2f6fb0"}
PANELS = {
    "pennies": ("Matching pennies", "from a fair coin"),
    "duopoly": ("A leader and a follower", "from Stackelberg's equilibrium"),
    "tandem": ("The tandem game", "from a fixed point"),
    "dilemma": ("The iterated prisoner's dilemma", "loss per step"),
}


def draw(curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], path: str) -> None:
    """Draw a panel for each game: each starting point thin, their mean thick."""
    figure = Figure(figsize=(11, 7), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    for axes, (name, (title, shown)) in zip(
        figure.subplots(2, 2).flat, PANELS.items(), strict=True
    ):
        for update, runs in curves[name].items():
            _lines(axes, update, runs)
        axes.set_title(title, fontsize=11, fontweight="bold", color=INK, loc="left")
        axes.set_ylabel(shown)
        axes.set_xlabel("steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
        axes.grid(axis="y", alpha=0.25)
    figure.axes[0].legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.08))
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, update: str, runs: Sequence[Sequence[float]]) -> None:
    for run in runs:
        axes.plot(run, color=COLORS[update], linewidth=0.6, alpha=0.35)
    mean = [sum(values) / len(values) for values in zip(*runs, strict=True)]
    axes.plot(mean, color=COLORS[update], linewidth=2, label=update)
