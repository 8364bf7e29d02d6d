"""Patterns of text that a reward begins to pay."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import sqrt
from statistics import fmean, pstdev

from lightning_rl.cli.bisect.suspicion import CALM, Batches, Cause, Suspicion, answer_of, named
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.rollout import Rollout, as_text

_Told = Sequence[tuple[set[str], float]]
"""The patterns and the reward of each rollout."""


def pattern(
    batches: Batches, first: int, contrary: tuple[int, int] | None = None
) -> Suspicion | None:
    """Suspect patterns of the text that earn much more than just before, and nearly always.

    Args:
        batches: the rollouts of each iteration.
        first: the earliest iteration with which the pattern may begin to be paid.
        contrary: the first and last iteration in which the same answers earn something else than
            before, which a pattern may explain: all of them together show more of it.
    """
    told = {v: [(features(s.rollout), s.reward) for s in own] for v, own in batches.items()}
    spans = chain([contrary] if contrary else [], _spans(told, first))
    return next(filter(None, (_explained(batches, told, found) for found in spans)), None)


def _spans(told: Mapping[int, _Told], first: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last iteration of what begins to be paid."""
    for onset in (v for v in sorted(told) if v >= first):
        before = _just_before(told, onset)
        paid = set(_paid(before, told[onset])) if before else set()
        last = onset
        while last + 1 in told and _earn(paid, told[last + 1]):
            last += 1
        if paid:
            yield onset, last


def _just_before(told: Mapping[int, _Told], onset: int) -> _Told:
    """Return what the iterations before one tell; nothing if these are too few."""
    calm = sorted(v for v in told if v < onset)[-CALM:]
    return [one for v in calm for one in told[v]] if len(calm) == CALM else []


def _explained(
    batches: Batches, told: Mapping[int, _Told], found: tuple[int, int]
) -> Suspicion | None:
    """Suspect what begins to be paid in some iterations, unless something else is paid, too."""
    onset, last = found
    before = _just_before(told, onset)
    pooled = [one for v in range(onset, last + 1) for one in told[v]]
    paid = _paid(before, pooled)
    if not paid:
        return None
    paid |= _paid(before, pooled, _Z_AMONG, _LEAST_AMONG)
    shows = partial(_shows, set(paid))
    newly = _newly_paid(batches, onset, last)
    if sum(map(shows, newly)) < _PURE * len(newly):
        return None
    shown = " or ".join(sorted(paid, key=lambda feature: -paid[feature])[:4])
    text = f"answers that {shown} earn {max(paid.values()):.2g} more than just before"
    return Suspicion(Cause.PATTERN, onset, last, text, named(batches, found, shows))


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
