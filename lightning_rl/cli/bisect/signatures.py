"""Signatures of causes in recorded rollouts: what is other from some iteration on than before.

A signature only suspects; whether it is the cause is tried by a rerun without it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from lightning_rl.cli.bisect.patterns import pattern
from lightning_rl.cli.bisect.suspicion import (
    CALM,
    Batches,
    Cause,
    Suspicion,
    answer_of,
    named,
    span,
)
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.cli.rerun.what_if import rollouts_of


def suspicions(
    batches: Batches, rows: Mapping[int, Mapping[str, float]], first: int
) -> list[Suspicion]:
    """Return what is suspect in iterations from ``first`` on, in the order to try it.

    Wrong rewards make outliers, and old weights gaps, so these come after their causes.
    """
    contrary = contradictions(batches, first)
    found = [
        rate(rows, first, max(batches)),
        credit(batches, first),
        out_of_range(batches, first),
        pattern(batches, first, None if contrary is None else (contrary.onset, contrary.last)),
        new_set(batches, first),
        contrary,
        outlier(batches, first),
        stale(batches, first),
        gap(batches, first),
    ]
    known = [one for one in found if one is not None]
    spans = {(one.onset, one.last) for one in known if one.cause is Cause.STALE}
    return [
        one for one in known if one.cause is not Cause.GAP or (one.onset, one.last) not in spans
    ]


def _rise(
    cause: Cause,
    values: Mapping[int, float],
    bound: Callable[[list[float]], float],
    text: str,
    first: int,
    batches: Batches,
) -> Suspicion | None:
    """Suspect all rollouts of iterations whose value exceeds a bound that those before them set.

    ``text`` says so, of the highest value ``now`` and the highest ``before``.
    """
    found = span(values, bound, first)
    if found is None:
        return None
    now = max(values[v] for v in range(found[0], found[1] + 1))
    before = max(value for v, value in values.items() if v < found[0])
    ids = named(batches, found, lambda _: True)
    return Suspicion(cause, *found, text.format(now=now, before=before), ids)


def rate(rows: Mapping[int, Mapping[str, float]], first: int, end: int) -> Suspicion | None:
    """Suspect a learning rate of more than twice the highest before."""
    rates = {v: row["policy/lr"] for v, row in rows.items() if "policy/lr" in row and v <= end}
    text = "the learning rate is up to {now:.3g}, and was at most {before:.3g} before"
    found = _rise(Cause.RATE, rates, lambda before: 2 * max(before), text, first, {})
    return found and replace(found, cap=max(r for v, r in rates.items() if v < found.onset))


def credit(batches: Batches, first: int) -> Suspicion | None:
    """Suspect advantages that do not follow the rewards of their groups."""

    def against(seen: Sequence[Seen]) -> float:
        pairs = [(s, s.reward - fmean(o.reward for o in g)) for g in _groups(seen) for s in g]
        spread = [(s, gap) for s, gap in pairs if abs(gap) > 1e-9 or abs(s.advantage) > 1e-9]
        wrong = [s for s, gap in spread if s.advantage * gap <= 0]
        return len(wrong) / max(1, len(spread))

    shares = {v: against(seen) for v, seen in batches.items()}
    text = "{now:.0%} of the advantages have another sign than reward minus the group's mean"
    return _rise(
        Cause.CREDIT, shares, lambda before: max(0.25, 2 * max(before)), text, first, batches
    )


def outlier(batches: Batches, first: int) -> Suspicion | None:
    """Suspect a rollout with a large share of all advantages, summed over tokens."""

    def share(seen: Seen, of: Sequence[Seen]) -> float:
        return seen.mass / (sum(s.mass for s in of) or 1.0)

    highest = {v: max(share(s, seen) for s in seen) for v, seen in batches.items() if seen}
    found = span(highest, lambda before: max(0.2, 3 * max(before)), first)
    if found is None:
        return None
    seen = batches[found[0]]
    top = max(seen, key=lambda s: s.mass)
    text = (
        f"rollout {top.rollout.id} has {share(top, seen):.0%} of all absolute advantages of "
        f"iteration {found[0]} (reward {top.reward:g}, {top.tokens} tokens)"
    )
    least = highest[found[0]] / 2
    ids = [s.rollout.id for v in range(found[0], found[1] + 1) for s in batches[v]
             if share(s, batches[v]) > least]  # fmt: skip
    return Suspicion(Cause.OUTLIER, *found, text, tuple(ids))


def out_of_range(batches: Batches, first: int) -> Suspicion | None:
    """Suspect a part of the reward that leaves the range it had before by more than half of it.

    One that prompt sets of before had not at all was 0 for them.
    """
    ranges: dict[str, tuple[float, float]] = {}
    sets: set[str] = set()
    for calm, onset in enumerate(sorted(batches)):
        parts = {name for s in batches[onset] for name in s.rollout.reward_parts}
        for name in sorted(parts) if onset >= first and calm >= CALM else ():
            low, high = ranges.get(name, (0.0, 0.0))
            outside = partial(_leaves, name, low, high, sets)
            strange = [s for s in batches[onset] if outside(s)]
            if strange:
                # What is paid rarely at first is not seen in each iteration.
                last = max(v for v, seen in batches.items() if any(map(outside, seen)))
                before = f"was between {low:g} and {high:g}" if low < high else f"was {low:g}"
                before = before if name in ranges else "was not there"
                ids = named(batches, (onset, last), outside)
                text = (
                    f"the reward {name} is {strange[0].rollout.reward_parts[name]:g} for "
                    f"{rollouts_of(len(ids))}, and {before} before"
                )
                part = name if low == high == 0.0 else None
                return Suspicion(Cause.RANGE, onset, last, text, ids, part=part)
        for name in parts:
            values = [s.rollout.reward_parts.get(name) for s in batches[onset]]
            known = [value for value in values if value is not None] + [*ranges.get(name, ())]
            if known:
                ranges[name] = min(known), max(known)
        sets |= {s.rollout.prompt.set for s in batches[onset]}
    return None


def _leaves(name: str, low: float, high: float, sets: set[str], seen: Seen) -> bool:
    value, room = seen.rollout.reward_parts.get(name), max(high - low, 1e-9) / 2
    if value is None or seen.rollout.prompt.set not in sets:
        return False
    return not low - room <= value <= high + room


def new_set(batches: Batches, first: int) -> Suspicion | None:
    """Suspect a prompt set that was not drawn from before."""
    known: set[str] = set()
    for place, onset in enumerate(sorted(batches)):
        new = {s.rollout.prompt.set for s in batches[onset]} - known
        if new and onset >= first and place >= CALM:
            return _of_set(batches, (onset, max(batches)), min(new), "it was not drawn from before")
        known |= new
    return None


def contradictions(batches: Batches, first: int) -> Suspicion | None:
    """Suspect answers that earn another reward than the same answer to the same prompt before."""
    known: defaultdict[tuple[str, str], set[float]] = defaultdict(set)
    shares: dict[int, float] = {}
    contrary: dict[int, list[Seen]] = {}
    for number in sorted(batches):
        seen = [s for s in batches[number] if answer_of(s) in known]
        contrary[number] = [s for s in seen if s.reward not in known[answer_of(s)]]
        shares[number] = len(contrary[number]) / len(seen) if len(seen) >= _KNOWN else 0.0
        found = span(shares, lambda before: max(0.1, 3 * max(before)), first)
        if found is None:  # the fault's own rewards are not what others are compared with
            for s in batches[number]:
                known[answer_of(s)].add(s.reward)
    if found is None:
        return None
    sets = {s.rollout.prompt.set for s in contrary[found[0]]}
    others = {s.rollout.prompt.set for s in batches[found[0]]} - sets
    text = (
        f"{shares[found[0]]:.0%} of the answers that were given to the same prompts before earn "
        "another reward"
    )
    if len(sets) == 1 and others:
        return _of_set(batches, found, min(sets), text)
    return Suspicion(Cause.ANSWER, *found, text, named(batches, found, lambda _: True))


_KNOWN = 4
"""Answers given before that an iteration needs to tell a share of contradictions."""


def _of_set(batches: Batches, found: tuple[int, int], name: str, text: str) -> Suspicion:
    ids = named(batches, found, lambda s: s.rollout.prompt.set == name)
    return Suspicion(Cause.SET, *found, f"prompt set {name!r}: {text}", ids)


def stale(batches: Batches, first: int) -> Suspicion | None:
    """Suspect rollouts of older weights than before."""

    def lag(seen: Seen, iteration: int) -> int:
        return iteration - 1 - min(seen.rollout.written_versions() or [iteration - 1])

    lags = {v: fmean(lag(s, v) for s in seen) for v, seen in batches.items() if seen}
    text = "the rollouts' weights are up to {now:.3g} versions old, and were {before:.3g} before"
    return _rise(Cause.STALE, lags, lambda before: max(before) + 0.5, text, first, batches)


def gap(batches: Batches, first: int) -> Suspicion | None:
    """Suspect rollouts whose probability is another to the trainer than to the engine."""
    gaps = {v: fmean(s.gap for s in seen) for v, seen in batches.items() if seen}
    text = "engine and trainer differ by {now:.2g} nats per token, although the tokens are stamped "
    text += "with the same version"
    return _rise(Cause.GAP, gaps, lambda before: max(0.01, 5 * max(before)), text, first, batches)


def _groups(seen: Iterable[Seen]) -> Iterator[list[Seen]]:
    groups: defaultdict[str, list[Seen]] = defaultdict(list)
    for s in seen:
        groups[s.rollout.group_id].append(s)
    yield from groups.values()
