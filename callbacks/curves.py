"""curves.png: a run's rewards, accuracy and step times, at a glance."""

from collections.abc import Sequence
from typing import Any

from lightning_rl.callbacks.headline import headline
from lightning_rl.stages import STAGES

Row = dict[str, float]


def plot_curves(history: Sequence[Row], path: str, title: str = "") -> None:
    """Write them to a PNG; nothing where there is nothing to see."""
    figure = draw_curves(history, title)
    if figure is not None:
        figure.savefig(path, dpi=110)


def draw_curves(history: Sequence[Row], title: str = "") -> Any:
    """Reward, accuracy and step-time parts by iteration, as a matplotlib ``Figure``, or None.

    There is no panel without data. Whether it has accuracy, mean reward or both of held-out
    rollouts: see ``headline``.
    """
    # The object interface: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = headline(history)
    panels = [
        panel
        for panel, wanted in (
            (_draw_rewards, _any(history, "reward/mean") or "eval/reward_mean" in shown),
            (_draw_accuracy, "eval/accuracy" in shown),
            (_draw_times, _any(history, "time/iteration")),
        )
        if wanted
    ]
    if not panels:
        return None
    figure = Figure(figsize=(9, 1.0 + 2.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        panel(place, history, shown)
    axes[-1].set_xlabel("iteration")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_rewards(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    _line(axes, history, "reward/mean", ".-", label="rollouts trained on")
    if "eval/reward_mean" in shown:
        _line(axes, history, "eval/reward_mean", "o-", label="held-out")
        axes.legend(fontsize="small")
    axes.set_ylabel("mean reward")
    axes.margins(y=0.08)


def _draw_accuracy(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    _line(axes, history, "eval/accuracy", "o-")
    axes.set_ylabel("held-out accuracy")
    values = [row["eval/accuracy"] for row in history if "eval/accuracy" in row]
    # At least a tenth high: the noise of a good run shall not look like mountains.
    room = max(0.1 - (max(values) - min(values)), 0.08 * (max(values) - min(values)))
    axes.set_ylim(max(-0.03, min(values) - room), min(1.03, max(values) + room))


def _draw_times(axes: Any, history: Sequence[Row], shown: Sequence[str]) -> None:
    rows = [row for row in history if "time/iteration" in row]
    parts = (*STAGES, "other")
    bottom = [0.0] * len(rows)
    for part in parts:
        heights = [max(row[f"time/{part}"], 0.0) for row in rows]
        axes.bar([row["iteration"] for row in rows], heights, 1.0, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.legend(ncols=len(parts), fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set_ylabel("seconds per iteration")


def _line(axes: Any, history: Sequence[Row], name: str, style: str, **options: Any) -> None:
    rows = [row for row in history if name in row]
    axes.plot([row["iteration"] for row in rows], [row[name] for row in rows], style, **options)
    axes.grid(alpha=0.3)


def _any(history: Sequence[Row], name: str) -> bool:
    return any(name in row for row in history)
