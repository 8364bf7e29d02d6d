"""Turns a rollout's model calls into rows of tokens: some calls extend a row, others begin one."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_rl.agents.prefixes import Prefixes
from lightning_rl.data.routing import beginning, extended
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Call, Placed, Rollout, Row, SamplingDistribution


@dataclass(slots=True)
class Captured:
    """A call with the tokens of its prompt and its answer.

    ``sampling`` is None if the call used the rollout's own settings.
    """

    call: Call
    role: str
    sampling: SamplingDistribution | None
    prompt_ids: list[int]
    completion: Completion
    pictures: list[Placed] = field(default_factory=list)


def own_sampling(rollout: Rollout, sampling: Sampling) -> SamplingDistribution | None:
    """Return the settings that a call was sampled with; None if they are the rollout's."""
    return None if sampling.distribution == rollout.sampling else sampling.distribution


def captured(rollout: Rollout, call: Call) -> Captured:
    """Return a call with its tokens, read from its row."""
    row, part = rollout.rows[call.row], slice(call.start, call.stop)
    completion = Completion(
        row.token_ids[part],
        row.logprobs[part],
        call.finish_reason,
        row.versions[part],
        beginning(row.routed_experts, len(row.prompt_ids) + call.stop),
    )
    return Captured(
        call,
        row.role,
        row.sampling,
        rollout.prompt_of(call),
        completion,
        rollout.pictures_of(call),
    )


def write(rollout: Rollout, one: Captured, prefixes: Prefixes) -> None:
    """Record a call as the last one: append it to a row that its prompt continues, or a new row.

    The call's prompt must begin with exactly the row's prompt and tokens, with the same pictures,
    and role and sampling must be equal; the longest such row is used. What the prompt adds is
    given, so it has no loss. Neither has a completion that cannot be scored. ``prefixes`` indexes
    the rollout's rows.
    """
    place = _row_for(rollout, one, prefixes)
    row, call, completion = rollout.rows[place], one.call, one.completion
    length = row.length
    new = [Placed(start - length, shown) for start, shown in one.pictures if start >= length]
    row.append_given(one.prompt_ids[length:], new)
    call.row, call.start = place, len(row.token_ids)
    row.append_written(
        completion.token_ids, completion.logprobs, completion.versions, call.scorable
    )
    row.routed_experts = extended(row.routed_experts, completion.routed_experts)
    call.stop = len(row.token_ids)
    rollout.calls.append(call)
    if place or row.token_ids:
        prefixes.grown(place)


def cut_anew(rollout: Rollout, calls: Iterable[Captured]) -> Prefixes:
    """Rebuild the rollout's rows from exactly these calls, in this order."""
    rollout.rows, rollout.calls = [Row.of(rollout.prompt)], []
    prefixes = Prefixes(rollout.rows)
    for one in calls:
        write(rollout, one, prefixes)
    return prefixes


def keep(rollout: Rollout, calls: Sequence[Call]) -> Prefixes:
    """Keep only these of the rollout's calls, in this order, and rebuild its rows."""
    before = replace(rollout)  # its rows; one prompt after the other is read off them
    return cut_anew(rollout, (captured(before, call) for call in calls))


def drop_unasked(rollout: Rollout) -> None:
    """Remove calls that nobody asked for in this attempt, and count their tokens as dropped."""
    if all(call.asked for call in rollout.calls):
        return
    rollout.dropped += sum(call.stop - call.start for call in rollout.calls if not call.asked)
    keep(rollout, [call for call in rollout.calls if call.asked])


def mask_roles(rollout: Rollout, roles: Collection[str]) -> None:
    """Exclude the tokens of these roles from the loss."""
    for row in rollout.rows:
        if row.role in roles:
            row.loss_mask[:] = [False] * len(row.loss_mask)


def _row_for(rollout: Rollout, one: Captured, prefixes: Prefixes) -> int:
    """Return the index of the longest row that the prompt continues; else of a new row."""
    rows = rollout.rows
    first = rows[0]
    if not first.token_ids and (first.prompt_ids, first.placed) == (one.prompt_ids, one.pictures):
        # The first row exists before any call; without tokens it belongs to no role yet.
        rows[0].role, rows[0].sampling = one.role, one.sampling
        return 0
    sampling = one.sampling or rollout.sampling
    counts = sampling.penalizes or bool(sampling.min_tokens)

    def may(row: Row) -> bool:
        """Tell whether a row may go on: same pictures, and given tokens between counted calls."""
        if row.placed != [shown for shown in one.pictures if shown.start < row.length]:
            return False
        return not (counts and row.token_ids and row.length == len(one.prompt_ids))

    place = prefixes.longest(one.prompt_ids, one.role, one.sampling, may)
    if place is not None:
        return place
    row = Row(one.prompt_ids, role=one.role, sampling=one.sampling)
    row.places, row.pictures = [at for at, _ in one.pictures], [shown for _, shown in one.pictures]
    rows.append(row)
    return len(rows) - 1
