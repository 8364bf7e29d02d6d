"""Test what a rollout keeps of its session: its id, the tools that were offered, and how."""

import json

import httpx
import pytest

from lightning_rl.agents.rows import drop_unasked
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.rollout import Rollout
from lightning_rl.serving.ask import usage_of
from tests.support.agents import add
from tests.support.served_chats import (
    END,
    QUESTION,
    TOKENIZER,
    TOOLS,
    Script,
    new_rollout,
    opened,
)

pytestmark = pytest.mark.anyio


SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
CHOSEN = {"type": "function", "function": {"name": "sub"}}


class Forms(Script):
    """Takes any form."""

    async def generate(self, token_ids, sampling, seed):
        self.turns = self.turns or ["{}" + END]
        return await super().generate(token_ids, sampling, seed)


async def test_tools_and_what_was_said_of_them_are_kept():
    async with opened(engine=Forms()) as desk:
        await desk.chat()
        await desk.chat(tools=TOOLS)
        await desk.chat(tools=TOOLS, tool_choice="none")
        await desk.chat(tools=[*TOOLS, SUB], tool_choice=CHOSEN)
        await desk.anthropic.messages.create(
            model="policy", max_tokens=50, messages=QUESTION,
            tools=[{"name": "add", "input_schema": {"type": "object"}}],
            tool_choice={"type": "any"},
        )  # fmt: skip
    rollout = desk.rollout
    choices = [call.tool_choice for call in rollout.calls]
    assert choices == [None, "auto", "none", "sub", "required"]
    plain = {"name": "add", "description": "", "parameters": {"type": "object"}}
    assert rollout.extra["tools"] == [*TOOLS, SUB, {"type": "function", "function": plain}]


async def test_an_answer_that_is_still_being_written_does_not_change_with_the_rollouts_rows():
    """The session ends meanwhile, and its rows are cut anew, without what nobody asks for."""
    async with opened("a" + END, "b" + END) as desk:
        first = await desk.session.chat(QUESTION)
        second = await desk.session.chat([{"role": "user", "content": "Another?"}])
        before = [list(answer.prompt_ids) for answer in (first, second)]
        rows = [answer.row for answer in (first, second)]
        first.call.asked = False
        drop_unasked(desk.rollout)
        assert not any(row is was for row in desk.rollout.rows for was in rows)
        assert [answer.prompt_ids for answer in (first, second)] == before
        assert usage_of([second]) == (len(before[1]), 2)
        first.call.row = 7  # as between the old rows and the new ones
        assert usage_of([first]) == (len(before[0]), 2)


async def test_a_session_has_the_same_name_when_it_is_played_again_and_a_client_may_say_another():
    names = []
    for _ in range(2):
        async with opened("One." + END) as desk:
            await desk.session.chat(QUESTION, tools=TOOLS)
            names.append(desk.rollout.extra["session_id"])
    assert names[0] == names[1]
    async with (
        opened("One." + END) as desk,
        httpx.AsyncClient(verify=False) as client,
    ):
        headers = {"authorization": f"Bearer {desk.session.api_key}", "x-session-id": "mine"}
        body = {"messages": QUESTION}
        await client.post(f"{desk.session.base_url}/chat/completions", json=body, headers=headers)
    assert desk.rollout.extra["session_id"] == "mine"


async def test_what_an_earlier_attempt_offered_is_forgotten():
    rollout = new_rollout()
    rollout.extra |= {"tools": [SUB], "kept": 1}
    async with (
        opened("One." + END) as desk,
        desk.server.session(rollout, desk.engine, Sampling(max_tokens=50)) as session,
    ):
        await session.chat(QUESTION)
    assert rollout.extra.keys() == {"kept", "session_id"}


async def test_an_agent_with_tools_of_its_own_keeps_them_too():
    agent = ToolAgent([add])
    agent.configure(TOKENIZER)
    made = await agent.run(new_rollout(), Script("It is 5." + END), Sampling(max_tokens=50))
    assert made.extra["tools"] == agent.toolbox.schemas
    assert [call.tool_choice for call in made.calls] == ["auto"]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".sqlite"])
async def test_files_keep_it_and_older_ones_are_read(ending, tmp_path):
    async with opened(engine=Forms()) as desk:
        await desk.session.chat(QUESTION, tools=TOOLS)
    rollout = desk.rollout
    file = open_rollouts(tmp_path / f"rollouts{ending}")
    file.append([rollout], 0)
    file.close()
    (read,) = [recorded.rollout for recorded in open_rollouts(file.path).read()]
    assert read == rollout
    assert (read.calls[0].tool_choice, read.extra["tools"]) == ("auto", TOOLS)
    older = json.loads(json.dumps(rollout.to_dict()))
    for call in older["calls"]:
        del call["tool_choice"]
    assert Rollout.from_dict(older).calls[0].tool_choice is None
