"""ThinkingBudget: a thought that ends in time is left alone, another is closed, without loss."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AddedToken

from lightning_rl.agents.base import SingleTurn
from lightning_rl.agents.thinking import ThinkingBudget
from lightning_rl.algos.advantages import GRPO
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.support.agents import Scripted
from tests.support.engine_checks import require_within_max_tokens
from tests.support.tiny_models import chatml_tokenizer, save_random_model


class Texts(Scripted):
    """Writes given texts."""

    def __init__(self, tokenizer, *texts: str, max_length: int = 1000) -> None:
        written = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        super().__init__(written, max_length)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture
def agent(tokenizer):
    agent = ThinkingBudget(max_thinking_tokens=6)
    agent.configure(tokenizer)
    return agent


def new(tokenizer, text="6*7?") -> Rollout:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Rollout(Prompt("0", text, ids), "1/0/0", 0, seed=5)


SAMPLING = Sampling(max_tokens=20)


def run(agent, rollout, engine, sampling=SAMPLING):
    asyncio.run(agent.run(rollout, engine, sampling))
    require_within_max_tokens(agent, rollout, engine, sampling.max_tokens)
    return rollout


def texts_by_mask(tokenizer, rollout):
    """Return what was written, and what was given."""
    [row] = rollout.rows
    pairs = list(zip(row.token_ids, row.loss_mask, strict=True))
    parts = ([token for token, mine in pairs if mine is wanted] for wanted in (True, False))
    return [tokenizer.decode(part) for part in parts]


def test_a_thought_in_time_is_one_request_as_without_a_budget(agent, tokenizer):
    text = "<think>ab</think>42<|im_end|>"
    engines = [Texts(tokenizer, text) for _ in range(2)]
    agent.max_thinking_tokens = 10
    budgeted = run(agent, new(tokenizer), engines[0])
    single = run(SingleTurn(), new(tokenizer), engines[1])
    assert (budgeted.rows, budgeted.finish_reason) == (single.rows, single.finish_reason)
    [(prompt, sampling, seed)] = engines[0].requests
    assert (prompt, seed) == (engines[1].requests[0][0], engines[1].requests[0][2])
    assert sampling.max_tokens == 10
    assert budgeted.logged == {"thinking/closed": 0.0, "thinking/tokens": 3.0}
    assert budgeted.completion == "<think>ab</think>42"


def test_a_long_thought_is_closed_and_the_answer_goes_on(agent, tokenizer):
    engine = Texts(tokenizer, "<think>abcdefghijklmnop", "42<|im_end|>")
    rollout = run(agent, new(tokenizer), engine)
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.finish_reason == "stop"
    written, given = texts_by_mask(tokenizer, rollout)
    assert (written, given) == ("<think>abcde42<|im_end|>", "\n</think>\n\n")
    assert rollout.completion == "<think>abcde\n</think>\n\n42"
    place = rollout.loss_mask.index(False)
    assert rollout.logprobs[place : place + 4] == [0.0] * 4
    assert rollout.versions[place : place + 4] == [-1] * 4
    assert rollout.logged == {"thinking/closed": 1.0, "thinking/tokens": 7.0}
    # Six thought, four given: ten of the 20 are left. Each request has a seed of its own.
    (_, first, seed), (second, answering, other) = engine.requests
    assert (first.max_tokens, answering.max_tokens) == (6, 10)
    assert second == rollout.prompt.token_ids + rollout.token_ids[:10]
    assert seed == rollout.seed != other
    assert [(c.start, c.stop, c.seed) for c in rollout.calls] == [(0, 6, seed), (10, 13, other)]


def test_no_gradient_reaches_what_was_given(agent, tokenizer):
    group = []
    for index, text in enumerate(["4<|im_end|>", "42<|im_end|>"]):
        engine = Texts(tokenizer, "<think>abcdefghijklmnop", text)
        group.append(run(agent, new(tokenizer), engine))
        group[-1].sample_index, group[-1].reward = index, float(index)
    batch = pack_rollouts(group)
    tokens = batch["tokens"]
    given = [tokenizer.convert_tokens_to_ids("</think>")]
    closing = torch.isin(tokens["input_ids"], torch.tensor(given))
    assert closing.sum() == 2
    assert not tokens["loss_mask"][closing].any()
    advantages = GRPO()(batch)["tokens", "advantages"]
    assert ((advantages != 0) == tokens["loss_mask"]).all()


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        ("6*7?", "abcdefghijkl<|im_end|>", 0.0),  # it does not think
        ("6*7?<think>\n\n</think>\n\n", "abcdefghijkl<|im_end|>", 0.0),  # enable_thinking: false
        ("6*7?", "<think>a</think>bcdefghijkl<|im_end|>", 2.0),  # closed in time, a long answer
    ],
)
def test_an_answer_that_is_long_is_not_closed(agent, tokenizer, prompt, text, tokens):
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine = Texts(tokenizer, text, tokenizer.decode(whole[6:]))
    rollout = run(agent, new(tokenizer, prompt), engine)
    assert rollout.token_ids == whole
    assert all(rollout.loss_mask)
    assert len(rollout.rows) == 1
    assert rollout.logged == {"thinking/closed": 0.0, "thinking/tokens": tokens}


def test_a_thought_that_the_template_opened_is_closed_too(agent, tokenizer):
    engine = Texts(tokenizer, "abcdefghijkl", "42<|im_end|>")
    rollout = run(agent, new(tokenizer, "6*7?<think>\n"), engine)
    assert rollout.completion == "abcdef\n</think>\n\n42"
    assert rollout.logged == {"thinking/closed": 1.0, "thinking/tokens": 7.0}


def test_a_chat_gets_one_message_even_where_penalties_make_two_rows(agent, tokenizer):
    sampling = replace(SAMPLING, presence_penalty=0.5)
    engine = Texts(tokenizer, "abcdefghijkl", "ghijkl<|im_end|>")
    rollout = new(tokenizer)
    rollout.prompt.prompt = [{"role": "user", "content": "6*7?"}]
    rollout.sampling = sampling.distribution
    run(agent, rollout, engine, sampling)
    assert len(rollout.rows) == 2  # the engine counts from each request on, so scoring does
    assert rollout.completion == [{"role": "assistant", "content": "abcdefghijkl"}]


@pytest.mark.parametrize(("max_tokens", "max_length"), [(10, 1000), (20, 14)])
def test_without_room_for_an_answer_it_ends_where_it_was_cut(
    agent, tokenizer, max_tokens, max_length
):
    """Six tokens of thought and four given fill ten; so do the prompt's four and ten."""
    engine = Texts(tokenizer, "<think>abcdefghijkl", max_length=max_length)
    rollout = run(agent, new(tokenizer), engine, Sampling(max_tokens=max_tokens))
    assert (rollout.finish_reason, rollout.completion) == ("length", "<think>abcde")
    assert rollout.logged == {"thinking/closed": 0.0, "thinking/tokens": 6.0}


def test_an_interrupted_answer_is_generated_again_and_the_thought_is_kept(agent, tokenizer):
    class Aborted(Texts):
        async def generate(self, token_ids, sampling, seed):
            done = await super().generate(token_ids, sampling, seed)
            return replace(done, finish_reason="abort") if len(self.requests) == 2 else done

    rollout = run(agent, new(tokenizer), Aborted(tokenizer, "<think>abcdefghijkl", "4"))
    assert rollout.status is RolloutStatus.ABORTED
    again = Texts(tokenizer, "42<|im_end|>")
    run(agent, rollout, again)
    whole = run(agent, new(tokenizer), Texts(tokenizer, "<think>abcdefghijkl", "42<|im_end|>"))
    assert (rollout.rows, rollout.calls) == (whole.rows, whole.calls)
    assert len(again.requests) == 1


def test_scoring_agrees_with_a_real_engine(tokenizer, tmp_path):
    """The trainer's logprobs are the engine's, also behind the tokens that were given."""
    save_random_model(tmp_path / "model", tokenizer, vocab_size=len(tokenizer))
    policy = Policy(str(tmp_path / "model"))
    save_skeleton(str(tmp_path / "model"), tmp_path / "skeleton")
    engine = TransformersEngine(device="cpu")
    engine.start(tmp_path / "skeleton")
    engine.load_weights(policy.named_weights(), version=0)
    agent = ThinkingBudget(max_thinking_tokens=4)
    agent.configure(tokenizer)
    prompt = new(tokenizer, "6*7?<think>\n").prompt
    rollouts = [Rollout(prompt, "1/0/0", n, seed=n) for n in range(4)]

    async def all_of_them():
        await asyncio.gather(*(agent.run(r, engine, Sampling(max_tokens=12)) for r in rollouts))

    asyncio.run(all_of_them())
    engine.close()
    closed = [r for r in rollouts if r.logged["thinking/closed"]]
    assert closed
    for rollout in rollouts:
        rollout.reward = 0.0
    batch = pack_rollouts(rollouts)
    with torch.no_grad():
        scored = policy(batch).logprobs
    written = batch["tokens", "rollout_logprobs"][batch["tokens", "loss_mask"]]
    assert scored.tolist() == pytest.approx(written.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_thinking_tokens": 0}, "max_thinking_tokens=0 must be >= 1"),
        ({"max_thinking_tokens": 4, "closing": "Enough."}, "must contain </think> and no <think>"),
        ({"max_thinking_tokens": 4, "closing": "</think><think>"}, "and no <think>"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ThinkingBudget(**arguments)


def test_a_tokenizer_that_does_not_think_is_refused():
    with pytest.raises(ConfigError, match=r"splits '<think>' into 7 tokens; leave the agent out"):
        ThinkingBudget(4).configure(chatml_tokenizer())


def test_a_budget_that_leaves_no_answer_is_refused(agent, tokenizer):
    with pytest.raises(ConfigError, match=r"max_thinking_tokens=6 leaves no room .*max_tokens=6"):
        run(agent, new(tokenizer), Texts(tokenizer), Sampling(max_tokens=6))
