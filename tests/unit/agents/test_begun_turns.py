"""Test prompts that end in a turn of the model, which every agent lets it continue.

The matrix: each agent and chat template. The tokens are those of transformers'
``continue_final_message``, and who reads the completion reads the whole turn.
"""

import asyncio
from typing import ClassVar

import pytest

from lightning_rl.agents.base import Reply, SingleTurn, new_rollouts
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.data.chats import render
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import DataError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import OURS, require_free
from tests.support.agents import add
from tests.support.engine_checks import FakeEngine
from tests.support.tiny_models import chat_tokenizer

ASK = {"role": "user", "content": "2 + 2?"}
BEGUN = {"role": "assistant", "content": "It is"}
TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "gemma", "mistral", "deepseek_r1_distill")


class Writes(FakeEngine):
    """Writes the same turn again and again, and notes what it was asked to continue."""

    max_length = 10_000

    def __init__(self, tokenizer, text):
        self.wrote = [*encoded(tokenizer, text), end_tokens_of(tokenizer).turn]
        self.asked = []

    async def generate(self, token_ids, sampling, seed):
        self.asked.append(list(token_ids))
        return Completion([*self.wrote], [-0.5] * len(self.wrote), "stop", [0] * len(self.wrote))


class Asks:
    """Asks once more, and is done; notes the turns that it sees."""

    turns: ClassVar[list[str]] = []

    def __init__(self, prompt):
        self.turns.clear()

    def step(self, turn):
        self.turns.append(turn)
        return Reply("And 1 more?", done=len(self.turns) == 2)

    def close(self):
        pass


def encoded(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def loaded(tokenizer, row, agent=None):
    prompts = IterablePrompts([row])
    prompts.load(tokenizer, {} if agent is None else agent.chat_options)
    return prompts


def played(agent, tokenizer, row, text=" 4."):
    """Play a row; return its rollout, the engine, and what a reward function read."""
    read = {}

    def reward(prompts, completions, **columns):
        read.update(prompts=prompts, completions=completions)
        return [1.0] * len(prompts)

    agent.configure(tokenizer)
    engine = Writes(tokenizer, text)
    [prompt] = loaded(tokenizer, row, agent).first()
    pipeline = RolloutPipeline(engine, agent, Rewards([reward]), tokenizer)
    [rollout] = pipeline.run([prompt], 1, Sampling(max_tokens=2000))
    assert rollout.error is None
    return rollout, engine, read


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_begun_turn_is_continued_as_transformers_does(template):
    tokenizer = chat_tokenizer(template)
    whole = tokenizer.apply_chat_template([ASK, BEGUN], tokenize=False, continue_final_message=True)
    [prompt] = loaded(tokenizer, {"prompt": [ASK, BEGUN]}).first()
    assert prompt.token_ids == encoded(tokenizer, whole)
    assert whole.endswith(BEGUN["content"])
    assert (prompt.prompt, prompt.begun, prompt.asked) == ([ASK], "It is", [ASK, BEGUN])


@pytest.mark.parametrize(
    "agent", [SingleTurn(), MultiTurn(Asks, allow_rewrites=True)], ids=["single", "multi"]
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_everyone_reads_the_whole_turn(template, agent):
    tokenizer = chat_tokenizer(template)
    rollout, engine, read = played(agent, tokenizer, {"prompt": [ASK, BEGUN]})
    assert engine.asked[0] == rollout.prompt.token_ids
    assert rollout.token_ids[: len(engine.wrote)] == engine.wrote
    assert read["prompts"] == [[ASK]]
    assert rollout.completion[0] == {"role": "assistant", "content": "It is 4."}
    assert read["completions"] == [rollout.completion]
    if isinstance(agent, MultiTurn):
        assert Asks.turns == ["It is 4.", " 4."]
        assert [m["content"] for m in rollout.completion[1:]] == [
            "And 1 more?",
            " 4.",
            "And 1 more?",
        ]


def test_a_call_of_a_tool_may_begin_in_the_prompt():
    tokenizer = chat_tokenizer("qwen2_5")
    begun = {"role": "assistant", "content": '<tool_call>\n{"name": "add", '}
    agent = ToolAgent([add], max_turns=1)
    text = '"arguments": {"a": 2, "b": 3}}\n</tool_call>'
    rollout, engine, _ = played(agent, tokenizer, {"prompt": [ASK, begun]}, text)
    [message] = rollout.completion
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert rollout.token_ids == engine.wrote


def test_an_open_thought_is_continued_and_not_closed():
    tokenizer = chat_tokenizer("qwen3")
    thought = {"role": "assistant", "content": "<think>\nTwo and"}
    opening = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, [ASK, thought], {}) == opening + thought["content"]


def test_a_chat_that_ends_in_calls_is_refused():
    calls = [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}]
    row = {"prompt": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]}
    prompts = loaded(chat_tokenizer("qwen2_5"), row)
    with pytest.raises(DataError, match="it ends in tool calls; let their results follow"):
        prompts.first()


# ---------------------------------------------------------------- a row's own variables


def schema(name):
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "enum": None}}}
    told = {"name": name, "description": "Adds.", "parameters": parameters}
    return {"type": "function", "function": told}


def test_what_follows_a_turn_has_the_rows_variables_too():
    """Qwen3 opens each turn by an empty thought where it is not to think."""
    tokenizer = chat_tokenizer("qwen3")
    row = {"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": False}}
    _, engine, _ = played(MultiTurn(Asks, allow_rewrites=True), tokenizer, row)
    empty = encoded(tokenizer, "<think>\n\n</think>\n\n")
    assert len(engine.asked) == 2
    assert all(asked[-len(empty) :] == empty for asked in engine.asked)
    _, engine, _ = played(MultiTurn(Asks, allow_rewrites=True), tokenizer, {"prompt": [ASK]})
    assert all(asked[-len(empty) :] != empty for asked in engine.asked)


def test_a_row_names_only_tools_that_the_agent_has():
    tokenizer = chat_tokenizer("qwen2_5")
    agent = ToolAgent([add])
    loaded(tokenizer, {"prompt": [ASK], "tools": [schema("add")]}, agent)
    with pytest.raises(
        DataError, match=r"row 0: .* names 'subtract', which the agent does not have"
    ):
        loaded(tokenizer, {"prompt": [ASK], "tools": [schema("subtract")]}, agent)


# ---------------------------------------------------------------- names


def test_columns_with_names_of_arguments_are_refused():
    """All that a function is called with, but for the columns, is reserved."""
    tokenizer, seen = chat_tokenizer("qwen2_5"), {}

    def everything(rollouts, pictures, **arguments):
        seen.update(arguments)
        return [0.0] * len(rollouts)

    rollouts = new_rollouts(
        loaded(tokenizer, {"prompt": "2", "mine": 1}).first(), 1, Sampling(), 0, 0
    )
    rewards = Rewards([everything])
    rewards.configure(tokenizer)
    engine = Writes(tokenizer, "4")
    for rollout in rollouts:
        asyncio.run(SingleTurn().run(rollout, engine, Sampling(max_tokens=9)))
    rewards.grade_here([rollouts])
    assert {*seen} - {"mine"} | {"rollouts", "pictures"} == {*OURS}
    for name in OURS:
        with pytest.raises(Exception, match=rf"the column '{name}'.*columns: {{my_{name}: {name}"):
            require_free([name], "rows.jsonl")
    require_free(["images", "answer", "tools"], "rows.jsonl")
