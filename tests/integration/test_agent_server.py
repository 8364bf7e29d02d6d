"""AgentServer on real vLLM: what went through it is what was generated, and forms are kept to."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
import torch

from lightning_rl.agents.templates import VLLMParser
from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.engines.sampling import Completion
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.serving.server import AgentServer
from tests.support.engine_checks import ROUNDING, own_logprobs, plain_model, same_draws
from tests.support.served_chats import ADD, QUESTION, TOOLS
from tests.support.tiny_models import save_chat_model

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chats") / "model"
    save_chat_model(directory, "qwen3")
    return Policy(str(directory))


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("skeleton")
    save_skeleton(policy.model, directory)
    engine = VLLMLocal(max_model_len=2048)
    engine.start(directory)
    engine.load_weights(policy.named_weights(), 0)
    yield engine
    engine.close()


@asynccontextmanager
async def opened(policy, engine, max_tokens=24, seed=11, responses=False, **options):
    server = AgentServer(policy.tokenizer, **options)
    rollout = Rollout(Prompt("p", QUESTION, [1, 2]), "g", 0, seed=seed)
    try:
        async with server.session(rollout, engine, Sampling(max_tokens=max_tokens)) as session:
            http = openai.DefaultAsyncHttpxClient(verify=False)
            key = session.api_key
            async with openai.AsyncOpenAI(
                base_url=session.base_url, api_key=key, http_client=http, max_retries=0
            ) as client:
                yield rollout, (client.responses if responses else client.chat.completions).create
    finally:
        await server.close()


async def talk(create, turns, stream=False, **options):
    """Hold a conversation, and a second one that forks off after the first answer."""
    chat = list(QUESTION)
    for number in range(turns):
        answer = await create(model="policy", messages=chat, tools=TOOLS, n=2, **options)
        message = answer.choices[number % 2].message
        chat += [message, {"role": "user", "content": f"And then? {number}"}]
    chunks = await create(model="policy", messages=chat[:3], stream=True, **options)
    return [chunk async for chunk in chunks]


async def test_what_was_asked_over_http_is_scored_and_generated_again(policy, engine, tmp_path):
    async with opened(policy, engine) as (rollout, create):
        await asyncio.gather(talk(create, 3), talk(create, 2, temperature=0.7))
    assert len(rollout.calls) == 2 * 3 + 2 * 2 + 2
    await require_recorded(policy, engine, rollout)


async def require_recorded(policy, engine, rollout):
    """Require that a plain model scores what was trained on alike, and that it is drawn again."""
    rows = rollout.rows
    plain = plain_model(policy.model, dict(policy.named_weights()))
    for row in rows:
        if row.token_ids and not row.sampling:
            mask = torch.tensor(row.loss_mask)
            scored = own_logprobs(plain, row.prompt_ids, row.token_ids)[mask]
            told = torch.tensor(row.logprobs)[mask]
            torch.testing.assert_close(told, scored, rtol=0, atol=ROUNDING)
    told, again = [], []
    for call in rollout.calls:
        row, span = rows[call.row], slice(call.start, call.stop)
        told.append(Completion(row.token_ids[span], row.logprobs[span], "stop", []))
        prompt = row.prompt_ids + row.token_ids[: call.start]
        temperature = (row.sampling or rollout.sampling).temperature
        sampling = Sampling(max_tokens=24, temperature=temperature)
        again.append(await engine.generate(prompt, sampling, call.seed))
    assert same_draws(again, told)


async def test_responses_are_scored_and_generated_again_too(policy, engine):
    adds = [{"type": "function", **ADD, "strict": False}]
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 2, "b": 3}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "5"}
    async with opened(policy, engine, responses=True) as (rollout, create):
        told = await create(model="policy", input=[*QUESTION, call, result], tools=adds)
        for number in range(3):
            # A random model hardly ever calls a tool; if it does, that is answered.
            calls = [item for item in told.output if item.type == "function_call"]
            said = [{**result, "call_id": item.call_id} for item in calls]
            said.append({"role": "user", "content": f"And then? {number}"})
            asked = {"model": "policy", "previous_response_id": told.id, "input": said}
            events = await create(**asked, tools=adds, stream=True)
            told = [event async for event in events][-1].response
    assert len(rollout.calls) == 4
    assert told.usage.output_tokens == rollout.calls[-1].stop - rollout.calls[-1].start
    assert rollout.extra["tools"] == TOOLS
    read = policy.tokenizer.decode(rollout.rows[rollout.calls[0].row].prompt_ids)
    assert "<tool_response>\n5\n</tool_response>" in read
    await require_recorded(policy, engine, rollout)
    goes = [{"type": "function", **CHOOSE[0]["function"], "strict": False}]
    async with opened(policy, engine, max_tokens=300, responses=True) as (rollout, create):
        forced = await create(model="policy", input=QUESTION, tools=goes, tool_choice="required")
    (item,) = forced.output
    assert json.loads(item.arguments)["way"] in ("left", "right")
    assert [call.scorable for call in rollout.calls] == [False]


async def test_an_answer_keeps_to_a_schema_and_is_not_trained_on(policy, engine):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "digit": {"enum": [1, 2, 3]}},
        "required": ["ok", "digit"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with opened(policy, engine, max_tokens=300) as (rollout, create):
        answer = await create(model="policy", messages=QUESTION, response_format=wanted)
        forced = await create(
            model="policy", messages=QUESTION, tools=CHOOSE, tool_choice="required"
        )
    found = json.loads(answer.choices[0].message.content)
    assert found.keys() == {"ok", "digit"}
    assert found["digit"] in (1, 2, 3)
    (call,) = forced.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["way"] in ("left", "right")
    assert not any(any(row.loss_mask) for row in rollout.rows)
    assert not any(call.scorable for call in rollout.calls)


CHOOSE = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "parameters": {
                "type": "object",
                "properties": {"way": {"enum": ["left", "right"]}},
                "required": ["way"],
                "additionalProperties": False,
            },
        },
    }
]


async def test_a_schema_that_is_none_is_refused_and_nothing_breaks(policy, engine):
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    async with opened(policy, engine) as (rollout, create):
        with pytest.raises(openai.BadRequestError):
            await create(model="policy", messages=QUESTION, response_format=broken)
        assert (await create(model="policy", messages=QUESTION)).choices[0].message.content
    assert len(rollout.calls) == 1


async def test_a_stop_string_ends_an_answer(policy, engine):
    async with opened(policy, engine, max_tokens=60) as (rollout, create):
        greedy = {"model": "policy", "messages": QUESTION, "temperature": 0}
        whole = (await create(**greedy)).choices[0].message.content
        stop = next(whole[i : i + 2] for i in range(5, 60) if whole[i : i + 2].isascii())
        cut = (await create(**greedy, stop=[stop])).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole.partition(stop)[0], "stop")
    row = rollout.rows[-1]
    assert policy.tokenizer.decode(row.token_ids).endswith(stop)


def test_a_parser_is_made_for_the_tools_of_each_request(policy):
    """vLLM's parsers are made with their tools: no chat may get those of another."""
    server = AgentServer(policy.tokenizer, VLLMParser("hermes"))
    forms = [server.formats.of(tools, {}) for tools in (TOOLS, CHOOSE, TOOLS)]
    assert forms[0] is forms[2]
    call = '<tool_call>\n{"name": "go", "arguments": {"way": "left"}}\n</tool_call>'
    assert [form._reader.read(call)[1][0].name for form in forms] == ["go"] * 3
    assert forms[0]._reader is not forms[1]._reader
