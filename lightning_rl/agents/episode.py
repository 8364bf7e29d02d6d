"""Episode: records the model calls of one rollout exactly, as rows of tokens to train on."""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

from lightning_rl.agents.base import completion_of, end
from lightning_rl.agents.prefixes import Prefixes
from lightning_rl.agents.rows import Captured, captured, keep, own_sampling, write
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling, seed_of
from lightning_rl.errors import ContextLengthError, EpisodeError
from lightning_rl.rollout import Call, Placed, Rollout, RolloutStatus, SamplingDistribution


class Episode:
    """Calls models for a rollout, and records everything in ``calls`` and in rows of tokens.

    A call whose prompt continues the exact tokens of a row, with the same role and sampling,
    extends the longest such row: what its prompt adds is given, so it has no loss. Any other call
    begins a row. Nothing is ever encoded or decoded, so training uses the generated tokens. When
    the episode ends, calls are put into the order in which they were asked (:meth:`settle`).

    Seeds depend on the request and on how often it was made before, but not on the time: a program
    that runs again makes the same requests and gets the same answers, even with concurrent calls.
    So the calls of an interrupted attempt are kept, and replayed instead of generated when they are
    asked again. Those that nobody has asked by the end of the rollout are dropped, and counted in
    ``rollout.dropped``.

    If the engine aborts any call, the rollout ends ABORTED. Calls under ``structured_outputs`` are
    recorded, but not trained on.

    Args:
        rollout: the rollout to fill. Whatever was set after its calls (their rewards and states,
            ``completion``, ``environment_reward``, ``role_rewards``) must be set again.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        if not rollout.calls:
            rollout.clear()
        rollout.status, rollout.finish_reason = RolloutStatus.INIT, None
        rollout.completion, rollout.environment_reward = "", None
        rollout.role_rewards = {}
        self._prefixes = Prefixes(rollout.rows)
        self._digests: dict[int, _Digest] = {}  # by the place of the row that was read last
        self._times: defaultdict[bytes, _Times] = defaultdict(_Times)
        self._held: dict[int, Call] = {}
        """Calls that can be replayed instead of generated, by seed."""
        self._asked_as: dict[int, tuple[bytes, int]] = {}  # by seed
        self._places: dict[int, int] = {}  # in the order of asking, by seed
        self._asking = count()
        for call in rollout.calls:
            call.asked, call.reward, call.state = False, None, None
            if call.finish_reason != "abort":
                self._held[call.seed] = call

    async def call(
        self,
        engine: Engine,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        role: str = "",
        pictures: Sequence[Placed] = (),
    ) -> tuple[Call, Completion]:
        """Let a role's model continue ``prompt_ids``, and record what it wrote.

        ``pictures`` are those of the prompt, at the places of their placeholders.

        Several calls may run concurrently. A cancelled call counts as never asked: repeating it
        gets the same answer. ``max_tokens`` is lowered to what the engine has room for.

        Raises:
            ContextLengthError: if the prompt leaves no room for a single token.
            EpisodeError: if the prompt is empty, or the rollout has ended (perhaps meanwhile).
            EngineError: if the engine fails.
        """
        self._require_open()
        engine, prompt = engine.of_role(role), list(prompt_ids)
        fitting = _fitting(engine, len(prompt), sampling)
        own = own_sampling(self.rollout, sampling)
        scorable = sampling.structured_outputs is None
        digest = self._digest(_asked(role, sampling, pictures), prompt, role, own)
        question = digest.question()
        first = self.rollout.prompt
        plain = not (role or own) and scorable and list(pictures) == first.placed
        seed = self._take_seed(question, plain and prompt == first.token_ids)
        place = next(self._asking)
        if (known := self._held.pop(seed, None)) is not None:
            known.asked, self._places[seed] = True, place
            try:
                await asyncio.sleep(0)  # others beside it ask first, as where it is generated
            except asyncio.CancelledError:
                self.undelivered(known)
                raise
            return known, captured(self.rollout, known).completion
        try:
            completion = await completion_of(engine, prompt, pictures, fitting, seed)
        except BaseException:
            self._forget(seed)
            raise
        if self.rollout.status is not RolloutStatus.INIT:
            self.rollout.dropped += len(completion.token_ids)
            self._require_open()
        call = Call(0, 0, 0, seed, completion.finish_reason, scorable=scorable)
        self._places[seed] = place
        made = Captured(call, role, own, prompt, completion, list(pictures))
        write(self.rollout, made, self._prefixes)
        self._digests[call.row] = digest.then(completion.token_ids)
        return call, completion

    def undelivered(self, call: Call) -> None:
        """Note that the client never got a call's answer, e.g. because a connection broke.

        A repeated request gets the same answer; if none comes, the answer is dropped. Noting it
        twice, or after the rollout has ended, has no effect.
        """
        if not call.asked or self.rollout.status is not RolloutStatus.INIT:
            return
        call.asked = False
        if call.finish_reason != "abort":
            self._held[call.seed] = call
        self._forget(call.seed)

    def settle(self) -> None:
        """Sort the calls by when they were asked, and rebuild their rows in that order.

        Until then they are in the order of their answers; :meth:`end` calls it.
        """
        if self.rollout.status is not RolloutStatus.INIT:
            return
        calls = self.rollout.calls
        places = [self._places[call.seed] if call.asked else inf for call in calls]
        if any(later < earlier for earlier, later in pairwise(places)):
            order = sorted(range(len(calls)), key=places.__getitem__)
            self._prefixes = keep(self.rollout, [calls[number] for number in order])
            self._digests.clear()

    def end(self, reason: str = "stop") -> None:
        """Record why the rollout ended: COMPLETED, or ABORTED by the engine or before any token."""
        self.settle()
        end(self.rollout, reason)

    def _require_open(self) -> None:
        if self.rollout.status is not RolloutStatus.INIT:
            raise EpisodeError(
                f"rollout {self.rollout.id!r} has ended ({self.rollout.status.value}) and takes no "
                "more calls; let the agent wait for its calls before it ends"
            )

    def _digest(
        self, asked: bytes, prompt: list[int], role: str, own: SamplingDistribution | None
    ) -> "_Digest":
        """Digest a request; where it continues an earlier one, hash only what is new."""
        place = self._prefixes.recent(prompt, role, own)
        before = None if place is None else self._digests.get(place)
        length = 0 if place is None else self.rollout.rows[place].length
        if before is None or (before.asked, before.length) != (asked, length):
            return _Digest(asked, 0, blake2b(asked, digest_size=16)).then(prompt)
        return before.then(prompt[length:])

    def _take_seed(self, question: bytes, own: bool) -> int:
        """Return the seed of a request: the rollout's own for the first asking of its ``own`` one.

        Other seeds are derived, with 63 bits. The calls that a branch has from before its fork keep
        the seeds they had in the original rollout.
        """
        number = self._times[question].take()
        seed = self.rollout.seed
        if number > 1 or not own:
            seed = _derived(seed, number, question)
        if self.rollout.fork is not None and seed not in self._held:
            seed = _derived(self.rollout.fork.seed, number, question)
        self._asked_as[seed] = question, number
        return seed

    def _forget(self, seed: int) -> None:
        """Free a seed, so that a repetition of its request gets it."""
        question, number = self._asked_as.pop(seed)
        self._times[question].give_back(number)


@dataclass(slots=True)
class _Times:
    """Numbers in use for repetitions of a request: 1 to ``most``, except the ``free`` ones."""

    most: int = 0
    free: list[int] = field(default_factory=list)  # a heap

    def take(self) -> int:
        """Return the smallest free number, and mark it as used."""
        if self.free:
            return heappop(self.free)
        self.most += 1
        return self.most

    def give_back(self, number: int) -> None:
        heappush(self.free, number)


@dataclass(frozen=True, slots=True)
class _Digest:
    """Incremental hash of a request's settings and token prefix."""

    asked: bytes
    length: int
    running: blake2b

    def then(self, token_ids: list[int]) -> "_Digest":
        running = self.running.copy()
        running.update(array("q", token_ids).tobytes())
        return _Digest(self.asked, self.length + len(token_ids), running)

    def question(self) -> bytes:
        """Return the bytes that identify this request."""
        return self.running.digest()


def _asked(role: str, sampling: Sampling, pictures: Sequence[Placed]) -> bytes:
    """Encode a request without its prompt's tokens: role, sampling settings and pictures."""
    settings = [float(value) for value in astuple(sampling.distribution)]
    shown = "".join(f"{start}:{picture.digest}/" for start, picture in pictures)
    return f"{role}/{settings}/{sampling.structured_outputs is not None}/{shown}".encode()


def _derived(seed: int, number: int, question: bytes) -> int:
    return seed_of(f"{seed}/{number}/".encode() + question)


def _fitting(engine: Engine, length: int, sampling: Sampling) -> Sampling:
    """Return the sampling with ``max_tokens`` lowered to the engine's room."""
    if length == 0:
        raise EpisodeError("a call has no prompt tokens; give the model a prompt to continue")
    room = engine.max_length - length
    if room < 1:
        raise ContextLengthError(
            f"a prompt of {length} tokens leaves no room in the engine's {engine.max_length}; "
            "shorten the history, or raise the engine's max_model_len if the model allows more"
        )
    if sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
