"""Test Episode: what models were asked and answered is what is trained on, however it was asked."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from lightning_rl import Prompt, Rollout, Sampling
from lightning_rl.collect.pipeline import run_agent
from lightning_rl.engines.sampling import Completion, StructuredOutputs
from lightning_rl.errors import ContextLengthError, EngineError, EpisodeError
from lightning_rl.extend import Agent, Episode, RolloutStatus
from lightning_rl.rollout import SamplingDistribution
from tests.support.agents import Hashing

PLAIN = Sampling(max_tokens=4)
PLAIN_AT_HALF = SamplingDistribution(temperature=0.5)
FORM = replace(PLAIN, structured_outputs=StructuredOutputs(choice=["7"]))


class Scripted(Hashing):
    """Writes these completions, one after the other; what is no list of tokens is raised."""

    def __init__(self, *answers) -> None:
        super().__init__()
        self.answers = list(answers)

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.asked.append(list(token_ids))
        self.samplings.append(sampling)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        count = len(answer)
        made = Completion(answer, [-0.5] * count, "stop", [2] * count)
        self.written[seed] = made
        return made


def new(seed: int = 5, prompt=(4, 5), **fields) -> Rollout:
    return Rollout(Prompt("p", "", list(prompt)), "g", 0, seed, **fields)


def play(program, engine, rollout=None) -> Rollout:
    """Run a program of calls to its end, as a run does."""
    rollout = rollout or new()

    class Programmed(Agent):
        async def run(self, rollout, engine, sampling):
            episode = Episode(rollout)
            await program(episode, engine)
            episode.end()
            return rollout

    asyncio.run(run_agent(Programmed(), rollout, engine, PLAIN))
    return rollout


def rows_of(rollout: Rollout) -> list[tuple[list[int], list[int], list[bool]]]:
    return [(row.prompt_ids, row.token_ids, row.loss_mask) for row in rollout.rows]


def spans(rollout: Rollout) -> list[tuple[int, int, int]]:
    return [(call.row, call.start, call.stop) for call in rollout.calls]


# ---------------------------------------------------------------- rows


def test_a_prompt_that_goes_on_from_a_row_continues_it():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 8, 2], PLAIN)

    rollout = play(program, Scripted([7, 8], [9]))
    assert rows_of(rollout) == [([4, 5], [7, 8, 2, 9], [True, True, False, True])]
    assert rollout.logprobs == [-0.5, -0.5, 0.0, -0.5]
    assert rollout.versions == [2, 2, -1, 2]
    assert spans(rollout) == [(0, 0, 2), (0, 3, 4)]
    assert rollout.completed
    assert rollout.finish_reason == "stop"


def test_edited_history_begins_a_row():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 9, 2], PLAIN)  # 8 became 9
        await episode.call(engine, [4, 5, 7, 9, 2, 3], PLAIN)  # and goes on from there

    rollout = play(program, Scripted([7, 8], [3], [6]))
    assert rows_of(rollout) == [
        ([4, 5], [7, 8], [True, True]),
        ([4, 5, 7, 9, 2], [3, 6], [True, True]),
    ]
    assert spans(rollout) == [(0, 0, 2), (1, 0, 1), (1, 1, 2)]


def test_the_longest_row_is_continued():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 8, 2], PLAIN)

    rollout = play(program, Scripted([7], [7, 8], [3]))
    assert [row.token_ids for row in rollout.rows] == [[7], [7, 8, 2, 3]]


def test_two_that_go_on_from_one_place_share_its_tokens_but_train_on_them_once():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 2], PLAIN)
        await episode.call(engine, [4, 5, 7, 3], PLAIN)

    rollout = play(program, Scripted([7], [8], [9]))
    assert rows_of(rollout) == [
        ([4, 5], [7, 2, 8], [True, False, True]),
        ([4, 5, 7, 3], [9], [True]),
    ]


@pytest.mark.parametrize(
    "other", [{"role": "critic"}, {"sampling": replace(PLAIN, temperature=0.5)}]
)
def test_another_role_or_another_way_to_sample_begins_a_row(other):
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7], **({"sampling": PLAIN} | other))
        await episode.call(engine, [4, 5, 7, 8], **({"sampling": PLAIN} | other))

    rollout = play(program, Scripted([7], [8], [9]))
    assert [row.token_ids for row in rollout.rows] == [[7], [8, 9]]
    row = rollout.rows[1]
    assert row.role == other.get("role", "")
    assert row.sampling == (PLAIN_AT_HALF if "sampling" in other else None)


def test_a_rollout_keeps_what_the_run_said_and_its_first_row_what_it_was_sampled_by():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], replace(PLAIN, temperature=0.5), "solver")

    rollout = play(program, Scripted([7]))
    row = rollout.rows[0]
    assert (rollout.sampling.temperature, row.sampling, row.role) == (1.0, PLAIN_AT_HALF, "solver")


def test_calls_that_count_from_their_first_token_are_not_taken_for_one():
    penalized = replace(PLAIN, presence_penalty=1.0)

    async def program(episode, engine):
        await episode.call(engine, [4, 5], penalized)
        await episode.call(engine, [4, 5, 7], penalized)  # nothing given in between
        await episode.call(engine, [4, 5, 7, 8, 2], penalized)  # a token that is

    rollout = play(program, Scripted([7], [8], [9]))
    assert [row.token_ids for row in rollout.rows] == [[7], [8, 2, 9]]


def test_a_completion_without_tokens_is_a_call_all_the_same():
    async def program(episode, engine):
        await episode.call(engine, [4, 6], PLAIN)
        await episode.call(engine, [4, 6], PLAIN)

    rollout = play(program, Scripted([], [9]))
    assert spans(rollout) == [(1, 0, 0), (1, 0, 1)]
    assert play(program, Scripted([], [])).status is RolloutStatus.ABORTED


def test_what_was_held_to_a_form_is_recorded_but_not_trained_on():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 2], FORM)
        await episode.call(engine, [4, 5, 7, 2, 8, 3], PLAIN)

    rollout = play(program, Scripted([7], [8], [9]))
    assert rows_of(rollout) == [([4, 5], [7, 2, 8, 3, 9], [True, False, False, False, True])]
    assert rollout.logprobs == [-0.5, 0.0, -0.5, 0.0, -0.5]
    assert [call.scorable for call in rollout.calls] == [True, False, True]


# ---------------------------------------------------------------- seeds, and what they are for


def test_the_first_call_is_what_a_single_turn_would_have_been():
    async def program(episode, engine):
        call, _ = await episode.call(engine, [4, 5], PLAIN)
        assert call.seed == 5

    assert play(program, Hashing()).calls


def test_seeds_differ_by_question_and_by_how_often_it_was_asked():
    async def program(episode, engine):
        for prompt, sampling, role in (
            ([4, 5], PLAIN, ""),
            ([4, 5], PLAIN, ""),
            ([4, 5], PLAIN, "critic"),
            ([4, 5], replace(PLAIN, temperature=0.5), ""),
            ([4, 5], FORM, ""),
            ([4], PLAIN, ""),
        ):
            await episode.call(engine, prompt, sampling, role)

    rollout = play(program, Hashing())
    assert len({call.seed for call in rollout.calls}) == 6


def test_order_is_that_of_asking_whoever_is_answered_first():
    async def program(episode, engine):
        first, second = asyncio.Event(), asyncio.Event()

        class Held(Scripted):
            async def generate(self, token_ids, sampling, seed):
                made = await super().generate(token_ids, sampling, seed)
                await {7: first, 8: second}[made.token_ids[0]].wait()
                return made

        held = Held([7], [8])
        one = asyncio.create_task(episode.call(held, [4, 5], PLAIN))
        await asyncio.sleep(0)
        two = asyncio.create_task(episode.call(held, [4, 5], PLAIN))
        await asyncio.sleep(0)
        second.set()
        call, _ = await two
        assert (call.row, episode.rollout.token_ids) == (0, [8])
        first.set()
        await one
        episode.settle()
        assert (call.row, episode.rollout.token_ids) == (1, [7, 8])

    rollout = play(program, Hashing())
    assert rollout.completed, rollout.error
    assert [row.token_ids for row in rollout.rows] == [[7], [8]]


def test_whoever_is_answered_first_the_rows_are_those_of_the_order_of_asking():
    async def program(episode, engine):
        for _ in range(3):
            prompts = [[4, 5] + [n % 3] * (n % 4) for n in range(40)]
            await asyncio.gather(*(episode.call(engine, prompt, PLAIN) for prompt in prompts))
            episode.settle()
            prompts = [row.prompt_ids + row.token_ids + [2] for row in episode.rollout.rows[:9]]
            await asyncio.gather(*(episode.call(engine, prompt, PLAIN) for prompt in prompts))

    class AtOnce(Hashing):
        """Answers in the order of asking, what the other answers in another."""

        def __init__(self, written) -> None:
            super().__init__()
            self.others = written

        async def generate(self, token_ids, sampling, seed) -> Completion:
            return self.others[seed]

    engine = Hashing()
    rollout = play(program, engine)
    assert rollout.completed, rollout.error
    assert rollout == play(program, AtOnce(engine.written))


def test_a_call_that_was_cancelled_has_not_been_asked():
    seeds = []

    class Slow(Scripted):
        async def generate(self, token_ids, sampling, seed):
            seeds.append(seed)
            if len(seeds) == 1:
                await asyncio.Event().wait()
            return await super().generate(token_ids, sampling, seed)

    async def program(episode, engine):
        asking = asyncio.create_task(episode.call(engine, [4, 5], PLAIN))
        while not seeds:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not episode.rollout.calls
        await episode.call(engine, [4, 5], PLAIN)

    rollout = play(program, Slow([7]))
    assert seeds == [5, 5]
    assert rollout.token_ids == [7]


def test_an_answer_that_never_arrived_is_given_again_or_dropped():
    async def again(episode, engine):
        lost, _ = await episode.call(engine, [4, 5], PLAIN)
        episode.undelivered(lost)
        call, completion = await episode.call(engine, [4, 5], PLAIN)
        assert call is lost
        assert completion.token_ids == [7, 8]

    async def never(episode, engine):
        lost, _ = await episode.call(engine, [4, 5], PLAIN)
        for _ in range(2):
            episode.undelivered(lost)
        told, _ = await episode.call(engine, [4], PLAIN)
        episode.end()
        episode.undelivered(told)

    rollout = play(again, Scripted([7, 8]))
    assert (rollout.token_ids, rollout.dropped) == ([7, 8], 0)
    rollout = play(never, Scripted([7, 8], [9]))
    assert (rows_of(rollout)[1:], rollout.dropped) == ([([4], [9], [True])], 2)
    assert spans(rollout) == [(1, 0, 1)]


# ---------------------------------------------------------------- an interrupted attempt


def test_an_interrupted_attempt_is_given_again_and_the_rest_of_it_dropped():
    async def first(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 2], PLAIN)

    async def second(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 3], PLAIN)

    rollout = play(first, Scripted([7], [8, 8, 8]))
    engine = Scripted([9])
    rollout = play(second, engine, Rollout.from_dict(rollout.to_dict() | {"status": "init"}))
    assert engine.asked == [[4, 5, 7, 3]]
    assert rows_of(rollout) == [([4, 5], [7, 3, 9], [True, False, True])]
    assert rollout.dropped == 3


def test_nothing_is_lost_when_it_is_interrupted_again_before_it_came_as_far():
    async def whole(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [4, 5, 7, 2], PLAIN)

    async def interrupted(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        raise asyncio.CancelledError

    finished = play(whole, Scripted([7], [8]))
    rollout = Rollout.from_dict(finished.to_dict() | {"status": "init"})
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted(Episode(rollout), Scripted()))
    again = Rollout.from_dict(rollout.to_dict())
    assert play(whole, Scripted(), again) == finished


def test_rewards_of_calls_are_told_again():
    async def program(episode, engine):
        call, _ = await episode.call(engine, [4, 5], PLAIN)
        assert call.reward is None
        assert call.state is None
        call.reward, call.state = 0.5, "start"

    rollout = play(program, Scripted([7]))
    assert play(program, Scripted(), replace(rollout, status=RolloutStatus.INIT)) == rollout


def test_an_aborted_call_ends_the_rollout_aborted_and_is_not_given_again():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)

    aborting = Hashing(reasons={1: "abort"})
    rollout = play(program, aborting)
    assert rollout.status is RolloutStatus.ABORTED
    engine = Hashing()
    rollout = play(program, engine, replace(rollout, status=RolloutStatus.INIT))
    assert engine.asked == [[4, 5]]
    assert rollout.dropped == len(aborting.written[5].token_ids)


# ---------------------------------------------------------------- what cannot be


def test_a_call_is_cut_to_the_room_that_there_is():
    async def program(episode, engine):
        await episode.call(engine, [3] * 62, replace(PLAIN, min_tokens=3))
        with pytest.raises(ContextLengthError, match="64 tokens leaves no room in the engine's 64"):
            await episode.call(engine, [3] * 64, PLAIN)
        with pytest.raises(EpisodeError, match="no prompt tokens"):
            await episode.call(engine, [], PLAIN)

    engine = Scripted([7, 7])
    rollout = play(program, engine)
    assert (engine.samplings[0].max_tokens, engine.samplings[0].min_tokens) == (2, 2)
    # A longer call would be scored so.
    assert rollout.rows[1].sampling == SamplingDistribution(min_tokens=3)


def test_history_that_grew_too_long_costs_one_rollout_and_not_the_run():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)
        await episode.call(engine, [3] * 64, PLAIN)

    rollout = play(program, Scripted([7]))
    assert rollout.status is RolloutStatus.FAILED
    assert "ContextLengthError: a prompt of 64 tokens leaves no room" in rollout.error
    assert rollout.token_ids == [7]


def test_a_call_after_the_end_is_refused_and_changes_nothing():
    class Late(Scripted):
        async def generate(self, token_ids, sampling, seed):
            if len(self.answers) == 1:
                await asyncio.sleep(0)
            return await super().generate(token_ids, sampling, seed)

    async def run():
        rollout, engine = new(), Late([7], [8, 8])
        episode = Episode(rollout)
        await episode.call(engine, [4, 5], PLAIN)
        late = asyncio.create_task(episode.call(engine, [3, 3, 3], PLAIN))
        await asyncio.sleep(0)
        episode.end()
        before = rollout.to_dict()
        with pytest.raises(EpisodeError, match=r"'g/0' has ended \(completed\)"):
            await late
        with pytest.raises(EpisodeError, match="has ended"):
            await episode.call(engine, [4, 5], PLAIN)
        assert rollout.to_dict() == before | {"dropped": 2}

    asyncio.run(run())


def test_an_engine_that_fails_ends_the_run():
    async def program(episode, engine):
        await episode.call(engine, [4, 5], PLAIN)

    with pytest.raises(EngineError, match="gone"):
        play(program, Scripted(EngineError("gone")))


# ---------------------------------------------------------------- any program


@dataclass
class Programs:
    """A program made of steps; what it does follows from them, and from the answers that it gets.

    Only what it breaks off is chance: whether that was answered depends on how long it took.
    """

    steps: list
    delivered: list[int] = field(default_factory=list)

    async def __call__(self, episode, engine) -> None:
        self.delivered.clear()
        history = list(episode.rollout.prompt.token_ids)
        for kind, number, role, sampling in self.steps:
            history = (history or [3])[-40:]
            if kind == "edit":
                history[number % len(history)] = 2
            if kind == "shorten":
                history = [4, 5, *history[len(history) - number % len(history) :]]
            if kind == "aside":
                answers = await asyncio.gather(
                    *(self._ask(episode, engine, [*history, n], sampling, role) for n in (0, 1, 0))
                )
                history += [n for answer in answers for n in answer]
                continue
            if kind == "chains":
                await asyncio.gather(
                    *(self._chain(episode, engine, [*history, n], sampling) for n in range(3))
                )
            if kind == "break off":
                task = asyncio.create_task(self._ask(episode, engine, history, sampling, role))
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            if kind == "lose":
                call, _ = await episode.call(engine, history, sampling, role)
                episode.undelivered(call)
            history += [*await self._ask(episode, engine, history, sampling, role), number % 4]

    async def _ask(self, episode, engine, prompt, sampling, role="") -> list[int]:
        call, completion = await episode.call(engine, prompt, sampling, role)
        self.delivered.append(call.seed)
        assert completion == engine.written[call.seed]
        return completion.token_ids

    async def _chain(self, episode, engine, prompt, sampling) -> None:
        for _ in range(2):
            prompt = [*prompt, *await self._ask(episode, engine, prompt, sampling), 1]


KINDS = ["go on", "edit", "shorten", "aside", "chains", "break off", "lose"]
WAYS = [PLAIN, replace(PLAIN, temperature=0.5), FORM, replace(PLAIN, min_tokens=1)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 30),
        st.sampled_from(["", "", "critic"]),
        st.sampled_from(WAYS),
    ),
    min_size=1,
    max_size=8,
)


def require_exact(rollout: Rollout, engine: Hashing) -> None:
    """Require that tokens with a loss are those generated, with their numbers, each once."""
    rows = rollout.rows
    trained = [[False] * len(row.token_ids) for row in rows]
    for call in rollout.calls:
        row, part = rows[call.row], slice(call.start, call.stop)
        made = engine.written[call.seed]
        assert (row.token_ids[part], row.logprobs[part]) == (made.token_ids, made.logprobs)
        assert row.versions[part] == made.versions
        assert row.loss_mask[part] == [call.scorable] * len(made.token_ids)
        assert not any(trained[call.row][part])
        trained[call.row][part] = row.loss_mask[part]
    assert trained == [row.loss_mask for row in rows]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_whatever_a_program_does_each_generated_token_is_trained_on_once_or_dropped(steps):
    engine, program = Hashing(), Programs(steps)
    rollout = play(program, engine)
    require_exact(rollout, engine)
    assert sorted(call.seed for call in rollout.calls) == sorted(program.delivered)
    held = sum(call.stop - call.start for call in rollout.calls)
    assert sum(len(c.token_ids) for c in engine.written.values()) == held + rollout.dropped


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    steps=STEPS.filter(lambda steps: all(kind != "break off" for kind, *_ in steps)),
    stops=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_a_program_that_is_interrupted_anywhere_ends_as_if_it_had_not_been(steps, stops):
    whole = play(Programs(steps), Hashing())
    engine, rollout = Hashing(), new()
    for ticks in stops:
        rollout = Rollout.from_dict(rollout.to_dict())
        asyncio.run(_interrupted(Programs(steps), engine, rollout, ticks))
        if rollout.status is not RolloutStatus.INIT:
            break
    else:
        rollout = play(Programs(steps), engine, Rollout.from_dict(rollout.to_dict()))
    require_exact(rollout, engine)
    if all(kind != "chains" for kind, *_ in steps):
        assert rollout.rows == whole.rows
        assert rollout.calls == whole.calls
    else:  # which of several chains asks first depends on how long their answers take
        assert sorted(map(str, rollout.rows)) == sorted(map(str, whole.rows))
        assert {c.seed for c in rollout.calls} == {c.seed for c in whole.calls}


async def _interrupted(program, engine, rollout, ticks: int) -> None:
    async def run():
        episode = Episode(rollout)
        await program(episode, engine)
        episode.end()

    task = asyncio.create_task(run())
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
