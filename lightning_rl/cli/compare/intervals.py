"""Intervals for a mean of paired differences that hold however often one looks at them.

Differences d_1, d_2, ... of pairs are taken as independent and Gaussian with an unknown mean and an
unknown variance. For a candidate mean m, the likelihood of the differences' ratios to the first
one, which the variance does not influence, under an effect (mean - m) / deviation drawn from
N(0, EFFECT²), divided by that under an effect of 0, is

    e_n(m) = w^(-1/2) ((1 + t²/(n-1)) / (1 + t²/((n-1) w)))^(n/2),   w = 1 + n EFFECT²,

where t = sqrt(n) (mean_n - m) / s_n is Student's statistic. At the true mean it is a nonnegative
martingale with expectation 1, so it ever exceeds 1/a with a probability of at most a (Ville 1939),
and the set of all m with e_n(m) < 1/a contains the true mean at all n at once with probability
1 - a. This is the confidence sequence of Wang and Ramdas (2025), "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance", with a Gaussian mixture over the
effect; Lai (1976), "On confidence sequences", has a flat one, and Rouder et al. (2009) use e_n as a
Bayes factor at a fixed n. It is a martingale with respect to the ratios only, but the bound is on
its supremum, so a decision to stop may also depend on the differences themselves, or on anything
else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

EFFECT = 2.0
"""Standard deviation of the mixture over effects. The intervals hold for any value; this one makes
those of four to eight pairs about as narrow as they can be."""
MOST_PAIRS = 1000
"""The number of pairs up to which :func:`pairs_needed` looks."""
_ROUNDING = 1e-9


def half_width(pairs: int, error: float) -> float:
    """Return half the width of an interval, in standard deviations of the differences.

    e_n(m) < 1/a solved for the distance of m from the mean: with K = (sqrt(w)/a)^(2/n), it is
    sqrt((n-1)/n (K-1) w / (w-K)), and infinite if K >= w, as for few pairs.

    Args:
        pairs: the number n of differences.
        error: the probability a that an interval of the sequence misses the mean.
    """
    w = 1 + pairs * EFFECT**2
    log_k = (math.log(w) / 2 - math.log(error)) * 2 / pairs
    if pairs < 2 or log_k >= math.log(w):
        return math.inf
    k = math.exp(log_k)
    return math.sqrt((pairs - 1) / pairs * (k - 1) * w / (w - k))


def pairs_needed(mean: float, spread: float, error: float) -> int | None:
    """Return the number of pairs at which the interval excludes 0, if mean and spread stay.

    Args:
        mean: the mean of the differences.
        spread: their standard deviation.
        error: as in :func:`half_width`.

    Returns:
        None if that is more than ``MOST_PAIRS``.
    """
    numbers = range(2, MOST_PAIRS + 1)
    return next((n for n in numbers if half_width(n, error) * spread < abs(mean)), None)


@dataclass(frozen=True)
class Interval:
    """The interval of the mean difference after some pairs; unbounded if there are too few.

    It is unbounded also if all differences are equal: Gaussian ones never are, so these say nothing
    about the spread of further ones.
    """

    pairs: int
    mean: float
    spread: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float], error: float) -> "Interval":
        """Compute it from the differences of all pairs so far, see :func:`half_width`."""
        count = len(differences)
        mean = fmean(differences) if differences else math.nan
        spread = stdev(differences) if count > 1 else 0.0
        if count > 1 and spread <= _ROUNDING * max(map(abs, differences)):
            spread = 0.0
        half = half_width(count, error) * spread if spread else math.inf
        return cls(count, mean, spread, mean - half, mean + half)

    @property
    def decided(self) -> bool:
        """True if it excludes 0."""
        return self.low > 0 or self.high < 0
