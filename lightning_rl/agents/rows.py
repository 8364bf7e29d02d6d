"""From a rollout's model calls to rows of tokens: what is merged, and what begins anew."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_rl.data.packing import PENALTIES
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import SAMPLED_BY, Call, Rollout, Row


@dataclass(slots=True)
class Captured:
    """A call with all that its rows say of it: what it was asked, and what it answered.

    ``settings`` are what of ``SAMPLED_BY`` is otherwise than the rollout says.
    """

    call: Call
    role: str
    settings: dict[str, float]
    prompt_ids: list[int]
    completion: Completion


def own_settings(rollout: Rollout, sampling: Sampling) -> dict[str, float]:
    """What of ``SAMPLED_BY`` is otherwise than the rollout says."""
    values = {name: getattr(sampling, name) for name in SAMPLED_BY}
    return {name: value for name, value in values.items() if value != getattr(rollout, name)}


def captured(rollout: Rollout, call: Call) -> Captured:
    """Read a call off its row."""
    row, part = rollout.rows()[call.row], slice(call.start, call.stop)
    completion = Completion(
        row.token_ids[part], row.logprobs[part], call.finish_reason, row.versions[part]
    )
    return Captured(call, row.role, row.sampling, rollout.prompt_of(call), completion)


def write(rollout: Rollout, one: Captured) -> None:
    """Record a call as the last: at the end of a row that its prompt goes on from, or of a new one.

    A row's prompt and tokens must be the very beginning of the call's prompt, written by the same
    role and sampled alike; the longest such row is taken. What the prompt adds is given, so without
    loss. So is a completion that cannot be scored.
    """
    place, row = _row_for(rollout, one)
    completion, call = one.completion, one.call
    given = one.prompt_ids[len(row.prompt_ids) + len(row.token_ids) :]
    written = len(completion.token_ids)
    row.token_ids += [*given, *completion.token_ids]
    row.loss_mask += [False] * len(given) + [call.scorable] * written
    row.logprobs += [0.0] * len(given) + completion.logprobs
    row.versions += [-1] * len(given) + completion.versions
    call.row, call.stop = place, len(row.token_ids)
    call.start = call.stop - written
    rollout.calls.append(call)


def cut_anew(rollout: Rollout, calls: Sequence[Captured]) -> None:
    """Let the rollout hold these calls, in this order, and nothing else."""
    rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.versions = [], [], [], []
    rollout.role, rollout.sampling = "", {}
    rollout.further, rollout.calls = [], []
    for one in calls:
        write(rollout, one)


def drop_unasked(rollout: Rollout) -> None:
    """Take out the calls that nobody asked for (again), and count their tokens as dropped."""
    if all(call.asked for call in rollout.calls):
        return
    calls = [captured(rollout, call) for call in rollout.calls]
    rollout.dropped += sum(len(c.completion.token_ids) for c in calls if not c.call.asked)
    cut_anew(rollout, [c for c in calls if c.call.asked])


def mask_roles(rollout: Rollout, roles: Collection[str]) -> None:
    """Take what these roles wrote out of the loss."""
    for row in rollout.rows():
        if row.role in roles:
            row.loss_mask[:] = [False] * len(row.loss_mask)


def _row_for(rollout: Rollout, one: Captured) -> tuple[int, Row]:
    """The place of the longest row that the prompt goes on from, and the row; a new one."""
    rows = rollout.rows()
    if not rollout.token_ids and one.prompt_ids == rollout.prompt.token_ids:
        rollout.role, rollout.sampling = one.role, one.settings
        return 0, rows[0]
    best, longest = None, -1
    for place, row in enumerate(rows):
        length = len(row.prompt_ids) + len(row.token_ids)
        begun = place > 0 or bool(row.token_ids)
        if begun and length > longest and _goes_on(rollout, one, row):
            best, longest = (place, row), length
    if best is not None:
        return best
    rollout.further.append(Row(one.prompt_ids, role=one.role, sampling=one.settings))
    return len(rollout.further), rollout.further[-1]


def _goes_on(rollout: Rollout, one: Captured, row: Row) -> bool:
    begin, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.token_ids)
    prompt = one.prompt_ids
    if row.role != one.role or row.sampling != one.settings or end > len(prompt):
        return False
    if end == len(prompt) > begin and _counts_in_turns(rollout, one):
        return False  # with nothing given in between, both calls would be scored as one turn
    return prompt[begin:end] == row.token_ids and prompt[:begin] == row.prompt_ids


_NOTHING = PENALTIES | {"min_tokens": 0}
"""Settings that look at what a call has written so far, and values that change nothing."""


def _counts_in_turns(rollout: Rollout, one: Captured) -> bool:
    return any(
        one.settings.get(name, getattr(rollout, name)) != nothing
        for name, nothing in _NOTHING.items()
    )
