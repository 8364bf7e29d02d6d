"""Estimates over prompts: pass@k, maj@k, their 95 % intervals, and paired comparisons.

Rollouts of one prompt resemble each other, so intervals count prompts, not rollouts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, sqrt
from statistics import NormalDist, fmean
from typing import Any

from lightning_rl.errors import DataError

_Z = NormalDist().inv_cdf(0.975)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is correct, from ``samples`` >= k of them.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, Codex, eq. 1).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def maj_at_k(answers: Sequence[Any], right: Sequence[bool], k: int) -> float:
    """Estimate the chance that the most frequent answer of k samples is right (maj@k).

    Self-consistency (Wang et al. 2023), averaged over consecutive blocks of k samples, which is
    unbiased. None is no answer, and has no vote. Of answers with equally many votes one counts as
    drawn at random.
    """
    starts = range(0, len(answers) - k + 1, k)
    return fmean(_vote(answers[i : i + k], right[i : i + k]) for i in starts)


def _vote(answers: Sequence[Any], right: Sequence[bool]) -> float:
    graded: dict[str, list[bool]] = defaultdict(list)
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            graded[str(answer)].append(is_right)
    most = max(map(len, graded.values()), default=0)
    return fmean([fmean(own) for own in graded.values() if len(own) == most] or [0.0])


def share_interval(
    totals: Sequence[float], counts: Sequence[float], draws: float
) -> tuple[float, float]:
    """Return the 95 % interval of a share p = sum(totals) / sum(counts) over prompts.

    It is Wilson's score interval (1927) for the effective number of samples of a clustered survey,
    p (1 - p) / se² (Korn and Graubard 1998; Dean and Pagano 2015), where se is the standard error
    between prompts (Miller 2024, "Adding Error Bars to Evals"). So it stays in [0, 1], has a width
    at p = 0 and 1, and with one sample per prompt is Wilson's own.

    Args:
        totals: by prompt, such as the number of right rollouts.
        counts: by prompt, such as the number of rollouts.
        draws: independent samples if prompts were all alike; the effective number is at most that.
    """
    whole = fsum(counts)
    p = fsum(totals) / whole
    squares = fsum((t - p * c) ** 2 for t, c in zip(totals, counts, strict=True)) / whole**2
    # At 0 or 1 no spread is seen, whether rollouts of a prompt resemble each other or not.
    n = float(len(totals)) if p in (0.0, 1.0) else draws
    if squares:
        n = min(n, p * (1 - p) / squares)
    wide = 1 + _Z**2 / n
    middle, half = p + _Z**2 / (2 * n), _Z * sqrt(p * (1 - p) / n + (_Z / (2 * n)) ** 2)
    return max(0.0, (middle - half) / wide), min(1.0, (middle + half) / wide)


def mean_by_prompt(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each prompt's values, by the prompt's key."""
    found: dict[str, list[float]] = defaultdict(list)
    for key, value in values:
        found[key].append(value)
    return {key: fmean(own) for key, own in found.items()}


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same prompts; differences are the second's score minus the first's.

    ``low`` and ``high`` bound the mean ``difference``: its 95 % interval by the standard error of
    the prompts' differences (Miller 2024). ``p_value`` is that of the two-sided sign
    test over prompts ``won`` and ``lost`` by the second, which is exact for any number of prompts.
    """

    before: float
    after: float
    difference: float
    low: float
    high: float
    prompts: int
    won: int
    lost: int
    p_value: float

    @classmethod
    def of(cls, before: Mapping[str, float], after: Mapping[str, float]) -> "Comparison":
        """Compare scores by prompt, on the prompts that both have.

        Raises:
            DataError: if these are fewer than two.
        """
        keys = [key for key in before if key in after]
        count = len(keys)
        if count < 2:
            raise DataError(
                f"a comparison needs at least 2 prompts that both have, but they share {count} "
                f"({len(before)} and {len(after)}); use rollouts of the same prompts"
            )
        gaps = [after[key] - before[key] for key in keys]
        gap = fmean(gaps)
        error = _Z * sqrt(fsum((g - gap) ** 2 for g in gaps) / (count - 1) / count)
        signs = Counter((g > 0) - (g < 0) for g in gaps)
        return cls(
            fmean(before[key] for key in keys),
            fmean(after[key] for key in keys),
            gap,
            gap - error,
            gap + error,
            count,
            signs[1],
            signs[-1],
            sign_test(signs[1], signs[-1]),
        )

    def __str__(self) -> str:
        return (
            f"{self.before:.4g} → {self.after:.4g}, {self.difference:+.3g} "
            f"[{self.low:+.3g}, {self.high:+.3g}]; {self.won} of {self.prompts} prompts won, "
            f"{self.lost} lost, sign test p = {self.p_value:.2g}"
        )


def sign_test(won: int, lost: int) -> float:
    """Return the two-sided p-value of the sign test: how likely are counts at least as uneven."""
    tail = sum(comb(won + lost, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))
