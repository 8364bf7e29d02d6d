"""The curve of a metric: where it dropped most, and whether that is more than noise."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

from lightning_rl.collect.estimates import Comparison
from lightning_rl.errors import DataError

Curve = Mapping[int, float]
"""Values of a metric by the iteration after which they were recorded."""

_NEAR = 0.2
"""Share of a drop within which a value counts as before it, or after it."""


class Window(NamedTuple):
    """Versions between which a metric dropped, and the number of pairs they were chosen from."""

    good: int
    bad: int
    pairs: int = 1


def curve_of(rows: Mapping[int, Mapping[str, float]], metric: str) -> dict[int, float]:
    """Return the recorded curve of a metric.

    Raises:
        DataError: if it was recorded less than twice.
    """
    curve = {i: row[metric] for i, row in rows.items() if math.isfinite(row.get(metric, math.nan))}
    if len(curve) < 2:
        known = sorted({name for row in rows.values() for name in row if "/" in name})
        alike = [name for name in known if name.split("/")[0] == metric.split("/")[0]] or known
        raise DataError(
            f"--metric {metric} was recorded {len(curve)} times, and a drop needs two values; "
            f"recorded were {', '.join(alike[:12])}"
        )
    return curve


def largest_drop(curve: Curve) -> Window | None:
    """Return the versions between which the metric fell most, as close together as the fall is.

    None if it never fell.
    """
    numbers = sorted(curve)
    drop, good, bad = 0.0, -1, -1
    highest = numbers[0]
    for number in numbers:
        if curve[number] > curve[highest]:
            highest = number
        if curve[highest] - curve[number] > drop:
            drop, good, bad = curve[highest] - curve[number], highest, number
    if drop == 0.0:
        return None
    inside = [n for n in numbers if good <= n <= bad]
    low, high = curve[bad] + _NEAR * drop, curve[good] - _NEAR * drop
    bad = next(n for n in inside if curve[n] <= low)
    good = max(n for n in inside if n < bad and curve[n] >= high)
    return Window(good, bad, math.comb(len(numbers), 2))


def beyond_noise(found: Comparison, pairs: int = 1) -> bool:
    """Return True if the 95 % interval of a difference leaves out 0, as the largest of ``pairs``.

    It is widened by Bonferroni's correction (Dunn 1961): a share of 0.05 / ``pairs`` lies outside.
    """
    z = NormalDist().inv_cdf(1 - 0.025 / pairs) / NormalDist().inv_cdf(0.975)
    return abs(found.difference) > (found.high - found.low) / 2 * z


def stands_out(curve: Curve, window: Window, times: float) -> bool:
    """Return True if a drop is more than so many times the spread of the curve's earlier steps.

    Training is noisy itself: a policy that fluctuates has real drops without a cause. A steady
    rise is no noise, so the spread is that of a control chart for individuals: the mean absolute
    difference of successive steps over 1.128 (2 / sqrt(pi); Montgomery, Introduction to Statistical
    Quality Control, section 6.4). It is taken of the steps before the window, or also
    of those after it if there are fewer than three differences; so few in all tell none.
    """
    before = _differences([curve[n] for n in sorted(curve) if n <= window.good])
    after = _differences([curve[n] for n in sorted(curve) if n >= window.bad])
    known = before if len(before) >= _FEWEST else before + after
    if len(known) < _FEWEST:
        return False
    usual = fmean(known) * math.sqrt(math.pi) / 2
    return curve[window.good] - curve[window.bad] > times * usual


_FEWEST = 3


def _differences(values: Sequence[float]) -> list[float]:
    """Return the absolute differences of successive steps."""
    return [abs(c - 2 * b + a) for a, b, c in zip(values, values[1:], values[2:], strict=False)]


def cost_of(window: Window, rows: Mapping[int, Mapping[str, float]], seconds: float) -> str:
    """Describe the work of a bisection, before it begins."""
    steps = math.ceil(math.log2(max(2, window.bad - window.good)))
    times = [row["time/train"] for row in rows.values() if "time/train" in row]
    took = f" (in the run an update took {math.fsum(times) / len(times):.3g} s)" if times else ""
    return (
        f"versions {window.good} to {window.bad}: up to {2 + steps} evaluations for the iteration, "
        "then for each suspected cause one or two, each after the updates from the nearest "
        f"checkpoint on{took}; nothing begins after {seconds:.0f} s (--budget)"
    )
