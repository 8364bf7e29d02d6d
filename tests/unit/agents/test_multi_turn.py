"""Test MultiTurn: token-exact turns, limits, resuming, and failures."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from lightning_rl.agents.base import (
    Environment,
    Reply,
    SingleTurn,
    continuation_seed,
    new_rollouts,
    recorded_turns,
)
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.data.end_tokens import EndTokens
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.rules import EnvironmentReward
from lightning_rl.rollout import Picture, Prompt, Rollout, RolloutStatus
from tests.support.agents import Scripted, Sums, long_game
from tests.support.engine_checks import require_within_max_tokens, same_draws
from tests.support.tiny_models import CHATML, chatml_tokenizer
from tests.support.tolerances import scores_rounding

EOS, EQUALS = 1, 2  # and 3 to 12 are the digits 0 to 9


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def real_engine(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("skeleton")
    save_skeleton(str(tiny_model), directory)
    engine = TransformersEngine(device="cpu")
    engine.start(directory)
    engine.load_weights(Policy(str(tiny_model)).named_weights(), 3)
    return engine


def new(seed: int = 5, prompt: str | list = "12=", token_ids=(4, 5, 2)) -> Rollout:
    return Rollout(Prompt("p", prompt, list(token_ids)), "g", 0, seed)


@pytest.fixture(scope="module")
def play(tokenizer) -> Callable[..., Rollout]:
    """Run one rollout to its end."""

    def run(engine, environment=Sums, rollout=None, sampling=None, **limits) -> Rollout:
        agent = MultiTurn(environment, **limits)
        agent.configure(tokenizer)
        sampling = sampling or Sampling(max_tokens=40)
        played = asyncio.run(agent.run(rollout or new(), engine, sampling))
        require_within_max_tokens(agent, played, engine, sampling.max_tokens)
        return played

    return run


# ---------------------------------------------------------------- tokens


def test_turns_and_answers_are_appended_as_they_are(play):
    # Token 13 has no text: encoding what was decoded would lose it.
    engine = Scripted([[5, 13, EOS], [10, EOS]])
    rollout = play(engine)
    answer = [EQUALS, 5]  # "=2"
    assert rollout.token_ids == [5, 13, EOS, *answer, 10, EOS]
    assert rollout.loss_mask == [True] * 3 + [False] * 2 + [True] * 2
    assert rollout.logprobs == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2
    assert rollout.versions == [7] * 3 + [-1] * 2 + [7] * 2
    assert rollout.environment_reward == 0.25 + 1.25
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    assert [tokens for tokens, _, _ in engine.requests] == [
        [4, 5, 2],
        [4, 5, 2, 5, 13, EOS, *answer],
    ]


def test_every_turn_has_a_seed_of_its_own_and_the_first_the_rollouts(play):
    engine = Scripted([[4, EOS], [4, EOS], [11, EOS]])
    play(engine, rollout=new(seed=77))
    first, *later = [seed for _, _, seed in engine.requests]
    assert first == 77
    assert later == [continuation_seed(77, 4), continuation_seed(77, 8)]
    assert len({first, *later}) == 3
    assert all(0 <= seed < 2**63 for seed in later)
    assert continuation_seed(78, 4) != continuation_seed(77, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_whole_trajectory(temperature, play, real_engine, tiny_model):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    for seed in range(6):
        sampling = Sampling(max_tokens=30, temperature=temperature)
        rollout = play(real_engine, long_game, new(seed), sampling, max_turn_tokens=3)
        ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
        with torch.no_grad():
            rows = plain(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        bound = scores_rounding(tiny_model, rows)
        for place, token in enumerate(rollout.token_ids):
            if rollout.loss_mask[place]:
                assert abs(rollout.logprobs[place] - float(rows[place, token])) < bound
                assert temperature or float(rows[place].max() - rows[place, token]) < bound
    assert len(recorded_turns(rollout)) > 1


def test_one_turn_is_what_a_single_turn_would_be(play, real_engine, tiny_model):
    sampling = Sampling(max_tokens=9)
    for seed in range(4):
        single = asyncio.run(SingleTurn().run(new(seed), real_engine, sampling))
        one = play(real_engine, rollout=new(seed), sampling=sampling, max_turns=1)
        assert one.token_ids == single.token_ids
        bound = scores_rounding(tiny_model, torch.tensor(single.logprobs))
        assert one.logprobs == pytest.approx(single.logprobs, abs=bound)


def test_rollouts_at_the_same_time_do_not_share_an_environment(tokenizer, real_engine):
    agent = MultiTurn(Sums, max_turn_tokens=2, max_turns=5)
    agent.configure(tokenizer)
    sampling = Sampling(max_tokens=40)

    async def together():
        return await asyncio.gather(*(agent.run(new(s), real_engine, sampling) for s in range(8)))

    rollouts = asyncio.run(together())
    alone = [asyncio.run(agent.run(new(seed), real_engine, sampling)) for seed in range(8)]
    assert same_draws(rollouts, alone)
    for ours, theirs in zip(rollouts, alone, strict=True):
        if ours.token_ids == theirs.token_ids:
            assert ours.environment_reward == theirs.environment_reward


def test_a_turn_ends_by_any_end_of_the_model(tokenizer):
    """Its text is what was written before the end, and one found in a rollout is over."""
    nine, heard = 12, []  # ends turns, and is an ordinary token for the tokenizer

    class Listens(Environment):
        def step(self, turn: str) -> Reply:
            heard.append(turn)
            return Reply("=", done=turn == "7")

    agent = MultiTurn(Listens)
    agent.configure(copy(tokenizer))
    agent._tokenizer.ends = EndTokens((EOS, nine), text=EOS, turn=EOS)
    whole = new()
    asyncio.run(agent.run(whole, Scripted([[5, nine], [10, EOS]]), Sampling(max_tokens=40)))
    assert whole.token_ids == [5, nine, EQUALS, 10, EOS]
    part = cut(whole, 2)  # interrupted before the answer
    asyncio.run(agent.run(part, Scripted([[10, EOS]]), Sampling(max_tokens=40)))
    assert part.token_ids == whole.token_ids
    assert heard == ["2", "7"] * 2


# ---------------------------------------------------------------- recorded turns


class Named(Sums):
    """Says in what state the game is."""

    def step(self, turn: str) -> Reply:
        return replace(super().step(turn), state=f"sum {self.sum}")


def calls_of(rollout: Rollout) -> list[tuple]:
    return [(c.start, c.stop, c.finish_reason, c.reward, c.state) for c in rollout.calls]


def test_each_turn_is_a_call_with_what_it_was_paid_and_the_state_it_was_asked_in(play):
    engine = Scripted([[5, EOS], [4, EOS], [10, EOS]])
    rollout = play(engine, Named)
    assert calls_of(rollout) == [
        (0, 2, "stop", 0.25, "12="),
        (4, 6, "stop", 0.25, "sum 2"),
        (8, 10, "stop", 1.25, "sum 3"),
    ]
    assert [call.seed for call in rollout.calls] == [seed for _, _, seed in engine.requests]
    assert sum(call.reward for call in rollout.calls) == rollout.environment_reward


def test_states_without_names_have_none_but_for_the_prompts(play):
    rollout = play(Scripted([[5, EOS], [10, EOS]]))
    assert [call.state for call in rollout.calls] == ["12=", None]


def test_a_turn_that_was_cut_is_a_call_that_nobody_paid(play):
    rollout = play(Scripted([[4, EOS]] * 9), sampling=Sampling(max_tokens=5))
    assert calls_of(rollout) == [(0, 2, "stop", 0.25, "12="), (4, 5, "length", None, None)]


def test_a_turn_as_long_as_allowed_came_to_its_end(play):
    rollout = play(Scripted([[4, 5, 6, EOS], [6, 6, 6, EOS]]), max_turn_tokens=2)
    assert [call.finish_reason for call in rollout.calls] == ["stop", "stop"]


def test_a_resumed_rollout_has_each_turn_once(play):
    whole = play(Scripted([[5, EOS], [4, EOS], [10, EOS]]), Named)
    turns = [[5, EOS], [4, EOS], [10, EOS]]
    for count, left in [(2, turns[1:]), (4, turns[1:]), (5, [[EOS], *turns[2:]]), (8, turns[2:])]:
        part = cut(whole, count)  # its calls are still those of the whole
        assert play(Scripted(left), Named, part).calls == whole.calls
        part = cut(whole, count)
        part.calls = []  # as it was interrupted
        assert play(Scripted(left), Named, part).calls == whole.calls


def test_a_rollout_that_ran_out_of_time_has_the_turns_that_it_made(play):
    class Slow(Named):
        async def step(self, turn: str) -> Reply:
            if self.sum:
                await asyncio.Event().wait()
            return super().step(turn)

    rollout = play(Scripted([[5, EOS], [4, EOS]]), Slow, max_seconds=0.2)
    assert rollout.finish_reason == "max_seconds"
    assert calls_of(rollout) == [(0, 2, "stop", 0.25, "12="), (4, 6, "stop", None, "sum 2")]


def test_a_state_is_named_by_text(play):
    class Numbered(Sums):
        def step(self, turn: str) -> Reply:
            return replace(super().step(turn), state=3)

    rollout = play(Scripted([[5, EOS]]), Numbered)
    assert rollout.status is RolloutStatus.FAILED
    assert "Numbered.step: TypeError: returned state=3; it must be a string" in rollout.error


# ---------------------------------------------------------------- resuming


def cut(rollout: Rollout, count: int) -> Rollout:
    """Return the rollout as it was after ``count`` tokens, through JSON's primitives."""
    record = rollout.to_dict() | {"status": "aborted", "finish_reason": "abort"}
    [row] = record["rows"]
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        row[name] = row[name][:count]
    return Rollout.from_dict(record)


class Forgetful(TransformersEngine):
    """Notes how many tokens each request begins with."""

    begun: list[int]

    async def generate(self, token_ids, sampling, seed):
        self.begun.append(len(token_ids))
        return await super().generate(token_ids, sampling, seed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_rollout_keeps_what_it_has_and_ends_the_same(
    temperature, play, tiny_model, real_engine, tmp_path
):
    save_skeleton(str(tiny_model), tmp_path)
    engine = Forgetful(device="cpu")
    engine.start(tmp_path)
    engine.load_weights(Policy(str(tiny_model)).named_weights(), 3)
    options = {
        "sampling": Sampling(max_tokens=24, temperature=temperature),
        "max_turn_tokens": 3,
        "environment": long_game,
    }
    whole = play(real_engine, **options)
    turns = recorded_turns(whole)
    assert len(turns) > 2
    between = {sum(len(t) + len(a) for t, a in turns[:n]) for n in range(len(turns) + 1)}
    between |= {sum(len(t) + len(a) for t, a in turns[:n]) + len(turns[n][0]) for n in range(2)}
    ends = []
    for count in range(len(whole.token_ids)):
        if count not in between and not whole.loss_mask[count]:
            continue  # answers are appended whole
        engine.begun = []
        resumed = play(engine, rollout=cut(whole, count), **options)
        assert resumed.token_ids[:count] == whole.token_ids[:count]
        assert min(engine.begun) >= 3 + count
        if temperature == 0.0 or count in between:
            ends.append(resumed)
            if resumed.token_ids == whole.token_ids:
                assert resumed.loss_mask == whole.loss_mask
                assert resumed.environment_reward == whole.environment_reward
                assert resumed.finish_reason == whole.finish_reason
    assert same_draws(ends, [whole] * len(ends))


def test_a_turn_written_to_its_end_is_not_gone_on_with(play):
    rollout = new()
    rollout.rows[0].append_written([5, EOS], [-1.0, -1.0], [3, 3])
    engine = Scripted([[10, EOS]])
    play(engine, rollout=rollout)
    assert rollout.token_ids == [5, EOS, EQUALS, 5, 10, EOS]
    assert rollout.versions == [3, 3, -1, -1, 7, 7]
    assert [tokens for tokens, _, _ in engine.requests] == [[4, 5, 2, 5, EOS, EQUALS, 5]]


@pytest.mark.parametrize("limit", ["stop", "max_turn_tokens"])
def test_so_is_one_that_a_stop_string_or_its_limit_ended(limit, play):
    rollout = new()
    rollout.rows[0].append_written([5, 6], [-1.0, -1.0], [3, 3])
    engine = Scripted([[10]])
    if limit == "stop":
        play(engine, rollout=rollout, sampling=Sampling(max_tokens=9, stop=["3"]))
    else:
        play(engine, rollout=rollout, max_turn_tokens=2)
    assert rollout.token_ids == [5, 6, EQUALS, 8, 10]


def test_an_environment_that_answers_otherwise_is_told_on(play):
    rollout = play(Scripted([[5, EOS], [10, EOS]]))
    rollout.token_ids[3] = 6  # as if "=3" had been said, not "=2"
    again = play(Scripted([]), rollout=cut(rollout, 4))
    assert again.status is RolloutStatus.FAILED
    assert "Sums.step answered turn 1 of a resumed rollout with '=2'" in again.error
    assert "'=3'" in again.error


def test_an_aborted_turn_can_be_finished(play):
    class Aborting(Scripted):
        async def generate(self, token_ids, sampling, seed):
            completion = await super().generate(token_ids, sampling, seed)
            return replace(completion, finish_reason="abort")

    rollout = play(Aborting([[5]]))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.ABORTED, "abort")
    assert rollout.token_ids == [5]
    engine = Scripted([[6, EOS], [9, EOS]])
    play(engine, rollout=rollout)
    assert rollout.token_ids == [5, 6, EOS, EQUALS, 8, 9, EOS]  # 2 and 3 make 5
    assert engine.requests[0][2] == continuation_seed(5, 1)
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")


# ---------------------------------------------------------------- limits


def test_max_turns_ends_with_the_models_turn_and_its_reward(play):
    rollout = play(Scripted([[4, EOS]] * 3), max_turns=3)
    assert rollout.finish_reason == "max_turns"
    assert rollout.token_ids == [4, EOS, EQUALS, 4, 4, EOS, EQUALS, 5, 4, EOS]
    assert rollout.environment_reward == 0.75


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [
        (1, [4]),  # cut within the first turn
        (2, [4, EOS]),  # no room for the answer
        (4, [4, EOS]),  # the answer would fit, and nothing after it
        (5, [4, EOS, EQUALS, 4, 4]),  # cut within the second turn
        (6, [4, EOS, EQUALS, 4, 4, EOS]),
    ],
)
@pytest.mark.parametrize("whose", ["sampling", "engine"])
def test_token_limits_count_everything_after_the_prompt(budget, tokens, whose, play):
    max_length = 3 + budget if whose == "engine" else 100
    sampling = Sampling(max_tokens=budget if whose == "sampling" else 50)
    rollout = play(Scripted([[4, EOS]] * 9, max_length), sampling=sampling)
    assert rollout.token_ids == tokens
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "length")
    shown = tokens.count(EOS)  # only whole turns reach the environment
    assert rollout.environment_reward == 0.25 * shown


def test_a_turn_as_long_as_allowed_is_a_turn(play):
    engine = Scripted([[4, 5, 6, EOS], [6, 6, 6, EOS]])
    rollout = play(engine, max_turn_tokens=2)
    assert rollout.token_ids == [4, 5, EQUALS, 6, 6, 6]  # 1 + 2, and 3 + 3: nine
    assert rollout.finish_reason == "stop"
    assert [sampling.max_tokens for _, sampling, _ in engine.requests] == [2, 2]


def test_min_tokens_of_the_sampling_holds_for_each_turn_and_never_breaks_its_limit(play):
    engine = Scripted([[4, EOS], [11, EOS]])
    play(engine, sampling=Sampling(max_tokens=6, min_tokens=3))
    assert [(s.min_tokens, s.max_tokens) for _, s, _ in engine.requests] == [(3, 6), (2, 2)]


@pytest.mark.parametrize("slow", ["engine", "environment"])
def test_wall_time_ends_a_rollout_that_waits(slow, play):
    class Waits(Sums):
        async def step(self, turn: str) -> Reply:
            if slow == "environment":
                await asyncio.Event().wait()
            return super().step(turn)

    class WaitsToo(Scripted):
        async def generate(self, token_ids, sampling, seed):
            if slow == "engine" and self.requests:
                await asyncio.Event().wait()
            return await super().generate(token_ids, sampling, seed)

    rollout = play(WaitsToo([[4, EOS]] * 2), Waits, max_seconds=0.05)
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "max_seconds")
    assert rollout.token_ids == ([4, EOS] if slow == "environment" else [4, EOS, EQUALS, 4])
    assert rollout.environment_reward == (0.0 if slow == "environment" else 0.25)


def test_too_short_a_rollout_is_skipped(play):
    rollout = play(Scripted([[12, EOS]]), min_tokens=3)
    assert rollout.status is RolloutStatus.SKIPPED
    assert rollout.error == "2 tokens after the prompt; min_tokens=3"
    assert play(Scripted([[12, EOS]]), min_tokens=2).status is RolloutStatus.COMPLETED


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_turns", 0), ("max_turn_tokens", 0), ("max_seconds", 0.0), ("min_tokens", -1)],
)
def test_limits_out_of_range_are_refused(limit, value):
    with pytest.raises(ConfigError, match=f"{limit}={value}"):
        MultiTurn(Sums, **{limit: value})


# ---------------------------------------------------------------- failures


def making(step=None, init=None, close=None) -> type[Environment]:
    class Broken(Environment):
        def __init__(self, prompt):
            if init:
                init()

        def step(self, turn):
            return step()

        def close(self):
            if close:
                close()

    return Broken


def boom():
    raise LookupError("no such game")


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (making(init=boom), "environment: LookupError: no such game"),
        (making(step=boom), "Broken.step: LookupError: no such game"),
        (making(step=lambda: os._exit(0)), "Broken.step: EndsProcess: os._exit(0)"),
        (making(step=lambda: None), "Broken.step: TypeError: returned None; expected a Reply"),
        (making(step=lambda: Reply("=", reward=float("nan"))), "reward=nan; it must be finite"),
        (making(step=lambda: Reply()), "no observation; the model needs one unless done=True"),
        (making(step=lambda: Reply("abc")), "'abc', which has no tokens"),
        (making(step=lambda: Reply([{"role": "user", "content": "="}])), "messages for a text"),
        (making(step=lambda: Reply(done=True), close=boom), "Broken.close: LookupError"),
    ],
)
def test_an_environments_mistakes_cost_one_rollout(environment, error, play):
    rollout = play(Scripted([[4, EOS]] * 2), environment)
    assert rollout.status is RolloutStatus.FAILED
    assert error in rollout.error
    assert rollout.finish_reason is None


def test_an_environment_that_uses_signals_costs_one_rollout(play):
    """It is asked in the loop's thread, where an alarm without a handler would end the process."""
    played = []
    environment = making(step=lambda: signal.alarm(60))
    asking = threading.Thread(
        target=lambda: played.append(play(Scripted([[4, EOS]] * 2), environment))
    )
    asking.start()
    asking.join()
    assert played[0].status is RolloutStatus.FAILED
    assert "signal.alarm works in the main thread only" in played[0].error


def test_half_of_a_character_is_read_as_another(play):
    replies = [Reply(done=True), Reply("=\ud83d")]
    rollout = play(Scripted([[4, EOS]] * 2), making(step=replies.pop))
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.token_ids == [4, EOS, EQUALS, 4, EOS]


def test_the_engines_mistakes_are_not_hidden(play):
    class Dead(Scripted):
        async def generate(self, token_ids, sampling, seed):
            raise EngineError("dead")

    class Late(Scripted):
        async def generate(self, token_ids, sampling, seed):
            raise TimeoutError("the server's own")

    with pytest.raises(EngineError, match="dead"):
        play(Dead([]))
    with pytest.raises(TimeoutError, match="the server's own"):
        play(Late([]), max_seconds=60.0)


def test_environments_are_closed_however_a_rollout_ends(play):
    closed = []

    class Closing(Sums):
        async def close(self):
            await asyncio.sleep(0)
            closed.append(self.sum)

    class Failing(Closing):
        def step(self, turn):
            boom()

    play(Scripted([[12, EOS]]), Closing)
    play(Scripted([[4, EOS]]), Closing, max_turns=1)
    play(Scripted([[4, EOS]]), Failing)
    with pytest.raises(IndexError):
        play(Scripted([[4, EOS]]), Closing)  # the engine runs out of turns
    assert closed == [9, 1, 0, 1]


def test_it_says_that_it_has_no_tokenizer():
    with pytest.raises(ConfigError, match="configure"):
        asyncio.run(MultiTurn(Sums).run(new(), Scripted([[4, EOS]]), Sampling()))


# ---------------------------------------------------------------- chats


@pytest.fixture(scope="module")
def chat_tokenizer() -> Qwen2Tokenizer:
    return chatml_tokenizer()


def test_a_chat_goes_on_as_its_template_would_render_it(chat_tokenizer):
    def encode(text: str) -> list[int]:
        return chat_tokenizer(text, add_special_tokens=False)["input_ids"]

    class Asks(Environment):
        def step(self, turn: str) -> Reply:
            if turn == "4":
                return Reply([{"role": "user", "content": "Yes."}], reward=1.0, done=True)
            return Reply("No, more.")

    question = [{"role": "user", "content": "1+3?"}]
    opened = chat_tokenizer.apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    agent = MultiTurn(Asks, max_turn_tokens=20)
    agent.configure(chat_tokenizer)
    rollout = new(prompt=question, token_ids=encode(opened))
    engine = Scripted([encode("3<|im_end|>"), encode("4<|im_end|>")], max_length=400)
    asyncio.run(agent.run(rollout, engine, Sampling(max_tokens=200)))
    assert rollout.completion == [
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "No, more."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Yes."},
    ]
    rendered = chat_tokenizer.apply_chat_template(question + rollout.completion[:3], tokenize=False)
    assert rollout.prompt.token_ids + rollout.token_ids == encode(rendered.removesuffix("\n"))
    written = [t for t, m in zip(rollout.token_ids, rollout.loss_mask, strict=True) if m]
    assert written == encode("3<|im_end|>4<|im_end|>")


def test_a_template_that_rewrites_turns_is_refused(chat_tokenizer, tiny_model):
    rewriting = AutoTokenizer.from_pretrained(tiny_model)
    rewriting.chat_template = CHATML.replace("m.content", "(m.content | trim)").replace(
        "<|im_end|>", "<eos>"
    )
    question = [{"role": "user", "content": "12="}]
    agent = MultiTurn(Sums)
    agent.configure(rewriting)
    with pytest.raises(ConfigError, match="rewrites"):
        asyncio.run(agent.run(new(prompt=question), Scripted([[4, EOS]]), Sampling()))
    agent = MultiTurn(Sums, allow_rewrites=True, max_turns=1)
    agent.configure(rewriting)
    rollout = asyncio.run(agent.run(new(prompt=question), Scripted([[4, EOS]]), Sampling(40)))
    assert rollout.status is RolloutStatus.COMPLETED


# ---------------------------------------------------------------- rewards and credit


def test_the_environments_reward_is_a_reward(play):
    rollouts = [play(Scripted([[12, EOS]])), play(Scripted([[4, EOS]] * 2), max_turns=2)]
    rewards = Rewards([EnvironmentReward()])
    asyncio.run(rewards.grade([rollouts]))
    assert [r.reward for r in rollouts] == [1.25, 0.5]
    assert rollouts[0].reward_parts == {"environment": 1.25}
    with pytest.raises(ConfigError, match="MultiTurn"):
        EnvironmentReward()([0.5, None])


def test_a_rollout_with_turns_survives_json(play):
    rollout = play(Scripted([[5, EOS], [10, EOS]]))
    assert asdict(Rollout.from_dict(rollout.to_dict())) == asdict(rollout)


class Greedy(Environment):
    """Keeps its row's answer for itself, and notes in the row what it did."""

    def __init__(self, prompt):
        self.answer = prompt.columns.pop("answer")
        prompt.columns["tests"]["seen"].append(prompt.id)
        prompt.token_ids.clear()

    def step(self, turn):
        return Reply(done=True)


def test_what_an_environment_changes_in_its_row_no_one_else_sees(tokenizer):
    rows = [{"prompt": "12=", "answer": "3", "tests": {"seen": []}}]
    prompts = IterablePrompts(rows)
    prompts.load(tokenizer)
    seen = []

    def reward(answer, tests, **_):
        seen.extend(zip(answer, tests, strict=True))
        return [1.0] * len(answer)

    agent = MultiTurn(Greedy)
    pipeline = RolloutPipeline(Scripted([[4, EOS]] * 8), agent, Rewards([reward]), tokenizer)
    agent.configure(tokenizer)
    for _ in range(2):  # epochs
        rollouts = pipeline.run(prompts.draw(1), 4, Sampling(max_tokens=4))
        assert all(r.prompt.columns == {"answer": "3", "tests": {"seen": []}} for r in rollouts)
        assert all(r.prompt.token_ids == [4, 5, 2] for r in rollouts)
    assert seen == [("3", {"seen": []})] * 8
    assert rows == [{"prompt": "12=", "answer": "3", "tests": {"seen": []}}]


def test_a_rollout_has_a_prompt_of_its_own_and_shares_what_nobody_changes():
    text, picture = "a" * 1000, Picture("d", 1, 1, b"x")
    chat = [{"role": "user", "content": text}]
    prompt = Prompt("p", chat, [3], {"n": [[text]]}, pictures=[picture], places=[0])
    first, second = new_rollouts([prompt], 2, Sampling(), seed=0, iteration=0)
    first.prompt.columns["n"][0].append(1)
    first.prompt.prompt[0]["content"] = "b"
    first.prompt.pictures.clear()
    assert second.prompt == prompt
    assert second.prompt.prompt[0]["content"] is text
    assert second.prompt.columns["n"][0][0] is text
    assert second.prompt.pictures[0] is picture
