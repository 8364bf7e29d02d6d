"""Patterns of text that a reward begins to pay."""

import re
from collections.abc import Sequence
from functools import partial
from math import sqrt
from statistics import fmean, pstdev

from lightning_rl.cli.bisect.suspicion import CALM, Batches, Cause, Suspicion, answer_of, named
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.rollout import Rollout, as_text


def pattern(batches: Batches, first: int) -> Suspicion | None:
    """Suspect patterns of the text that earn much more than just before, and nearly always."""
    numbers = sorted(batches)
    told = {v: [(features(s.rollout), s.reward) for s in own] for v, own in batches.items()}
    for place, onset in enumerate(numbers):
        calm = numbers[max(0, place - CALM) : place]
        before = [one for v in calm for one in told[v]]
        if onset < first or len(calm) < CALM or not _paid(before, told[onset]):
            continue
        paid, last, pooled = _paid(before, told[onset]), onset, list(told[onset])
        while last + 1 in told and _earn(set(paid), told[last + 1]):
            last += 1
            pooled += told[last]  # which shows more of what is paid
            paid |= _paid(before, pooled, _Z_AMONG, _LEAST_AMONG)
        newly = _newly_paid(batches, onset, last)
        if sum(_shows(set(paid), seen) for seen in newly) < _PURE * len(newly):
            continue  # something else is paid, too
        ids = named(batches, (onset, last), partial(_shows, set(paid)))
        shown = " or ".join(sorted(paid, key=lambda feature: -paid[feature])[:4])
        text = f"answers that {shown} earn {max(paid.values()):.2g} more than just before"
        return Suspicion(Cause.PATTERN, onset, last, text, ids)
    return None


def _shows(paid: set[str], seen: Seen) -> bool:
    return bool(features(seen.rollout) & paid)


def _newly_paid(batches: Batches, onset: int, last: int) -> list[Seen]:
    """Return the rollouts that earn the most, but for answers that did so before the onset."""

    def best(own: Sequence[Seen]) -> list[Seen]:
        most = max(seen.reward for seen in own)
        return [seen for seen in own if seen.reward == most]

    before = {answer_of(seen) for v, own in batches.items() if v < onset for seen in best(own)}
    after = (seen for v in range(onset, last + 1) for seen in best(batches[v]))
    return [seen for seen in after if answer_of(seen) not in before]


_Told = Sequence[tuple[set[str], float]]
"""The patterns and the reward of each rollout."""


def _paid(before: _Told, now: _Told, least_z: float = 5.0, least: int = 4) -> dict[str, float]:
    """Return the patterns that begin to be paid, each with how much more it earns.

    Args:
        before: rollouts of the iterations before.
        now: rollouts that may show a pattern.
        least_z: standard errors by which a pattern's effect on the reward must rise: there are
            hundreds of patterns.
        least: rollouts with and without a pattern that it takes to compare them.
    """
    jumps = {}
    for feature in {feature for found, _ in now for feature in found}:
        if _earn({feature}, now, least):
            z, jump = _jump(feature, before, now, least)
            if z >= least_z:
                jumps[feature] = jump
    return jumps


def _earn(paid: set[str], now: _Told, least: int = 1) -> bool:
    """Return True if nearly all rollouts with one of these patterns earn the most."""
    most = max(reward for _, reward in now)
    earned = [reward == most for found, reward in now if found & paid]
    return sum(earned) >= max(least, _PURE * len(earned))


_Z_AMONG, _LEAST_AMONG = 3.0, 2
"""The bounds for further patterns, where one is paid already."""
_PURE = 0.9
"""Least share of the answers with a pattern that earn the most, if it is the pattern that pays."""


def features(rollout: Rollout) -> set[str]:
    """Return patterns of a rollout's text, as the ends of sentences."""
    text = as_text(rollout.completion).strip()
    words = re.findall(r"\w+|[^\w\s]", text)
    parts = set(words) if len(words) > 1 else set(text)
    found = {f"contain {part!r}" for part in parts}
    found |= {f"begin with {text[:1]!r}", f"end with {text[-1:]!r}"}
    found |= {"are a number alone"} if text.isdecimal() else {"are no number alone"}
    return found | ({"are cut off"} if rollout.finish_reason == "length" else set())


def _jump(feature: str, before: _Told, now: _Told, least: int) -> tuple[float, float]:
    """Return by how much a pattern's effect on the reward rose: in standard errors, and itself.

    One that was hardly seen before had no effect.
    """
    effects, variance = [0.0, 0.0], 0.0
    for place, told in enumerate((before, now)):
        having = [reward for found, reward in told if feature in found]
        others = [reward for found, reward in told if feature not in found]
        if len(having) >= least and len(others) >= least:
            effects[place] = fmean(having) - fmean(others)
            spread = pstdev([*having, *others])
            variance += spread**2 * (1 / len(having) + 1 / len(others))
        elif place == 1:
            return 0.0, 0.0
    jump = effects[1] - effects[0]
    return jump / sqrt(variance) if variance else 0.0, jump
