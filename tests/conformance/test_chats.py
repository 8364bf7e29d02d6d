"""Test real tokenizers and templates: the tokens that are trained on are those of the whole chat.

Slow: real tokenizers take seconds to load, and the largest has 262,144 tokens.
"""

import asyncio
from functools import cache
from itertools import pairwise

import pytest
from transformers import LlamaConfig

from lightning_rl.agents.base import Reply, SingleTurn, new_rollouts
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.data.supervised import supervised_rollout
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer, with_chat_variables
from tests.support.agents import Scripted, add
from tests.support.chats import CHATS, EMPTY_THOUGHT
from tests.support.real_models import MODELS, folder_of
from tests.support.tiny_models import save_random_model
from tests.support.tolerances import distance

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is 2 + 2?"}
MORE = {"role": "user", "content": "And 1 more?"}


@cache
def read(name, **variables):
    return with_chat_variables(load_tokenizer(str(folder_of(name))), variables)


@pytest.fixture(params=CHATS)
def chats(request):
    return CHATS[request.param]


@pytest.fixture
def tokenizer(chats):
    """Load the tokenizer of these chats, with the variables of its template."""
    return read(chats.tokenizer, **chats.variables)


def turn(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments, content=""):
    """Return a turn that calls ``add``, as data sets and agents have it."""
    function = {"name": "add", "arguments": arguments}
    return turn(content, tool_calls=[{"id": "call00000", "type": "function", "function": function}])


def result(text):
    return {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": text}


def by_template(tokenizer, messages, opened=False, **variables):
    """Render a chat with transformers."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=opened, return_dict=False, **variables
    )


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_of(tokenizer, messages, **columns):
    prompts = IterablePrompts([{"prompt": messages, **columns}])
    prompts.load(tokenizer)
    return prompts[0]


def require_whole(tokenizer, token_ids, messages, **variables):
    """Require that the tokens are the chat, but for white space at the template's end."""
    whole = by_template(tokenizer, messages, **variables)
    assert token_ids == whole[: len(token_ids)]
    assert tokenizer.decode(whole[len(token_ids) :]).strip() == ""


def written(rollout):
    """Return the stretches of tokens that the model wrote, from the mask."""
    row, found = rollout.rows[0], [[]]
    for token, ours in zip(row.token_ids, row.loss_mask, strict=True):
        if ours:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


class Asks:
    """Asks once more, and is done."""

    def __init__(self, prompt):
        self.replies = [Reply([MORE]), Reply("", done=True)]

    def step(self, turn):
        return self.replies.pop(0)

    def close(self): ...


def played(agent, tokenizer, prompt, *turns):
    """Return a rollout of these turns."""
    sampling = Sampling(max_tokens=1000)
    [rollout] = new_rollouts([prompt], 1, sampling, 0, 0)
    agent.configure(tokenizer)
    return asyncio.run(agent.run(rollout, Scripted(turns, max_length=100_000), sampling))


def test_ends_and_beginnings_are_the_familys(chats, tokenizer):
    ends = end_tokens_of(tokenizer)
    assert set(tokenizer.convert_ids_to_tokens([*ends.token_ids])) == set(chats.ends)
    assert tokenizer.convert_ids_to_tokens(ends.turn) == chats.ends[-1]
    begin = [] if chats.begin is None else [tokenizer.convert_tokens_to_ids(chats.begin)]
    chat, text = (prompt_of(tokenizer, prompt).token_ids for prompt in ([ASKED], "2 + 2"))
    assert chat[: len(begin)] == begin
    assert not set(begin) & set(chat[len(begin) :])
    assert text == tokenizer("2 + 2")["input_ids"]
    # A text may have been rendered already.
    rendered = (chats.begin or "") + "2 + 2"
    assert prompt_of(tokenizer, rendered).token_ids == encoded(tokenizer, rendered)


def test_prompts_are_what_the_template_makes_of_them(chats, tokenizer):
    prompts = [[ASKED], [ASKED, turn(chats.wrote[0]), MORE]]
    for messages in prompts + [[SYSTEM, *chat] for chat in prompts if chats.system]:
        expected = by_template(tokenizer, messages, opened=True)
        assert prompt_of(tokenizer, messages).token_ids == expected
    asked = [ASKED, call({"a": 2, "b": 2}), result("4")]
    if chats.calls is not None:
        shown = asked
        if chats.calls == "text":
            shown = [ASKED, call('{"a": 2, "b": 2}', content=None), result("4")]
        assert prompt_of(tokenizer, asked).token_ids == by_template(tokenizer, shown, opened=True)


def test_completions_of_data_sets_end_the_chat(chats, tokenizer):
    for before in ([], [SYSTEM] * chats.system, [ASKED, turn(chats.wrote[0])]):
        messages, text = [*before, ASKED], chats.wrote[1]
        if before[:1] == [ASKED] and chats.turns == 1:
            continue
        rollout = supervised_rollout(
            prompt_of(tokenizer, messages, answer=text), "answer", tokenizer
        )
        row = rollout.rows[0]
        require_whole(tokenizer, row.prompt_ids + row.token_ids, [*messages, turn(text)])
        assert written(rollout) == [encoded(tokenizer, text + chats.ends[-1])]


@pytest.mark.parametrize("cut", [False, True])
def test_turns_grown_token_by_token_are_the_whole_chat(chats, tokenizer, cut):
    """A first turn that was cut at its limit is closed, without loss."""
    first, last = (encoded(tokenizer, text + chats.ends[-1]) for text in chats.wrote)
    limit = len(first) - 1 if cut else None
    agent = MultiTurn(Asks, max_turn_tokens=limit, allow_rewrites=chats.rewrites is not None)
    rollout = played(agent, tokenizer, prompt_of(tokenizer, [ASKED]), first, last)
    last = last[:limit]
    assert rollout.error is None
    assert written(rollout) == [first[:limit], last]
    row = rollout.rows[0]
    tokens, opened = row.prompt_ids + row.token_ids, [ASKED, turn(chats.wrote[0]), MORE]
    if chats.turns == 2:
        assert tokens == by_template(tokenizer, opened, opened=True) + last
        if not cut:
            require_whole(tokenizer, tokens, [*opened, turn(chats.wrote[1])])
    else:  # the opening of a turn is not shown later
        before = by_template(tokenizer, [ASKED], opened=True) + first
        whole = by_template(tokenizer, opened, opened=True)
        assert tokens[: len(before)] == before
        assert tokens[len(before) : -len(last)] == whole[-(len(tokens) - len(before) - len(last)) :]
    ends = end_tokens_of(tokenizer).token_ids
    assert not any(a in ends and b in ends for a, b in pairwise(tokens))


def test_templates_that_rewrite_turns_are_refused(chats, tokenizer):
    template = TurnTemplate(tokenizer)
    if chats.rewrites is None:
        template.check([MORE])
    else:
        with pytest.raises(ConfigError) as refused:
            template.check([MORE])
        assert chats.rewrites in str(refused.value)


def test_calls_and_results_are_the_whole_chat(chats, tokenizer):
    agent = ToolAgent([add])
    if chats.tools is not None:
        with pytest.raises(ConfigError) as refused:
            agent.configure(tokenizer)
        assert chats.tools in str(refused.value)
        return
    asked = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    turns = [encoded(tokenizer, text + chats.ends[-1]) for text in (asked, chats.wrote[1])]
    agent = ToolAgent([add], allow_rewrites=chats.rewrites is not None)
    agent.configure(tokenizer)
    prompts = IterablePrompts([[ASKED]])
    prompts.load(tokenizer, agent.chat_options)
    rollout = played(agent, tokenizer, prompts[0], *turns)
    assert written(rollout) == turns
    row = rollout.rows[0]
    chat = [ASKED, call({"a": 2, "b": 2}), result("4"), turn(chats.wrote[1])]
    require_whole(tokenizer, row.prompt_ids + row.token_ids, chat, **agent.chat_options)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_sampled_and_scored_without_a_padding_token(name, tmp_path):
    tokenizer = load_tokenizer(str(folder_of(name)))
    tokenizer.pad_token = None
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "head_dim": 8, "pad_token_id": None}
    # Not Qwen's configuration, with which transformers would give any tokenizer Qwen's padding.
    save_random_model(tmp_path / "model", tokenizer, LlamaConfig, initializer_range=0.3, **sizes)
    policy, engine = Policy(str(tmp_path / "model")), TransformersEngine(device="cpu")
    assert policy.tokenizer.pad_token is None
    save_skeleton(policy.model, tmp_path / "engine")
    engine.start(tmp_path / "engine")
    engine.load_weights(policy.named_weights(), 0)
    sampling = Sampling(max_tokens=5)
    texts = ["2", "What is 2 + 2?", "Four."]
    prompts = IterablePrompts(texts)
    prompts.load(policy.tokenizer)
    rollouts = new_rollouts(prompts.first(), 2, sampling, 0, 0)

    async def write():
        agent = SingleTurn()
        agent.configure(policy.tokenizer)
        await asyncio.gather(*(agent.run(one, engine, sampling) for one in rollouts))

    asyncio.run(write())
    batch = pack_rollouts(rollouts)
    scored = policy.score(batch, "logprobs", 1000)["tokens", "logprobs"]
    assert distance(scored, batch["tokens", "rollout_logprobs"]) < 1e-5


def test_a_tokenizer_without_a_template_is_given_texts():
    tokenizer = read("gptoss")
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        prompt_of(tokenizer, [ASKED])
    prompt = prompt_of(tokenizer, "2 + 2 =", answer=" 4")
    rollout = supervised_rollout(prompt, "answer", tokenizer)
    assert prompt.token_ids + rollout.token_ids == encoded(tokenizer, "2 + 2 = 4<|return|>")


def test_an_empty_thought_is_what_qwen3_is_given():
    tokenizer = read("qwen3")
    opened = by_template(tokenizer, [ASKED], opened=True)
    without = by_template(tokenizer, [ASKED], opened=True, enable_thinking=False)
    assert without == opened + encoded(tokenizer, EMPTY_THOUGHT)
