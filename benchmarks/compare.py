"""How often `lightning-rl compare` is wrong, and how many pairs it needs, on simulated runs.

    python -m benchmarks.compare [--times 1000]

A simulated run has a true accuracy: 0.6, plus a part that is common to both runs of a seed, plus
its own. It is evaluated by one sample on each of 400 held-out prompts of unequal difficulty, which
are the same for all runs. The own parts are Gaussian, heavy-tailed (Student's t with 3 degrees of
freedom), skewed (an exponential: some runs fall behind), or skewed in one of the two configurations
only. In a null both configurations have the same expected accuracy, and after each pair
the interval is looked at; a false alarm is one that excludes 0 after any pair. Power is the share
of comparisons that are decided within 8 pairs, with Gaussian parts, if the second configuration
is better by 2, 5 or 10 points. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

import numpy as np
from numpy.random import Generator

from lightning_rl.cli.compare.comparison import ERROR
from lightning_rl.cli.compare.intervals import Interval

PROMPTS, ACCURACY, PAIRS = 400, 0.6, 8
COMMON, OWN = 0.02, 0.02
"""Standard deviations of the parts of a run's accuracy."""

# The log odds of a right answer, by prompt, and the mean chance by what is added to all of them.
_SHIFTS = np.linspace(-12, 12, 2401)
_ODDS = 2 * np.random.default_rng(0).standard_normal(PROMPTS)
_MEANS = (1 / (1 + np.exp(-_ODDS - _SHIFTS[:, None]))).mean(1)


def chances(accuracy: float) -> np.ndarray:
    """Return the chance of a right answer of each prompt, with this mean; shape (PROMPTS,)."""
    shift = np.interp(accuracy, _MEANS, _SHIFTS)
    return 1 / (1 + np.exp(-_ODDS - shift))


def gaussian(random: Generator) -> tuple[float, float]:
    """Return the own parts of two runs, in standard deviations; so do all functions below."""
    a, b = random.standard_normal(2)
    return a, b


def heavy(random: Generator) -> tuple[float, float]:
    a, b = random.standard_t(3, 2) / 3**0.5
    return a, b


def skewed(random: Generator) -> tuple[float, float]:
    a, b = 1 - random.exponential(size=2)
    return a, b


def skewed_in_one(random: Generator) -> tuple[float, float]:
    return 0.0, 2 * (1 - random.exponential())


KINDS: Sequence[Callable[[Generator], tuple[float, float]]] = (
    gaussian,
    heavy,
    skewed,
    skewed_in_one,
)


def differences(
    kind: Callable[[Generator], tuple[float, float]], effect: float, random: Generator
) -> list[float]:
    """Return the differences of PAIRS pairs; the second configuration is better by ``effect``."""
    found = []
    for _ in range(PAIRS):
        common = ACCURACY + COMMON * random.standard_normal()
        a, b = kind(random)
        shares = [
            (random.random(PROMPTS) < chances(accuracy)).mean()
            for accuracy in (common + OWN * a, common + OWN * b + effect)
        ]
        found.append(float(shares[1] - shares[0]))
    return found


def pairs_until_decided(found: Sequence[float]) -> int | None:
    """Return the number of pairs after which a comparison stops; None if it is never decided."""
    looks = range(2, len(found) + 1)
    return next((n for n in looks if Interval.of(found[:n], ERROR).decided), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1000, help="simulations of each kind")
    times = parser.parse_args().times
    random = np.random.default_rng(0)
    alarms = {}
    for kind in KINDS:
        nulls = [differences(kind, 0.0, random) for _ in range(times)]
        alarms[kind.__name__] = sum(pairs_until_decided(found) is not None for found in nulls)
        spread = fmean(map(stdev, nulls))
        print(
            f"{kind.__name__}: {alarms[kind.__name__]} false alarms in {times}, spread {spread:.3f}"
        )
    result: dict[str, float | None] = {
        "nulls": times * len(KINDS),
        "false_alarms": sum(alarms.values()),
        "false_alarms_worst": max(alarms.values()) / times,
    }
    for points in (2, 5, 10):
        stops = [
            pairs_until_decided(differences(gaussian, points / 100, random)) for _ in range(times)
        ]
        decided = [pairs for pairs in stops if pairs is not None]
        result[f"power_{points}_points"] = len(decided) / times
        result[f"pairs_{points}_points"] = median(decided) if decided else None
        print(f"{points} points: decided {len(decided)} of {times}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
