"""AgentServer under hostile requests: the client's mistake is the client's, and nobody else's."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from lightning_rl.engines.sampling import Completion, Sampling
from tests.unit.test_agent_server import END, QUESTION, TOOLS, Script, encoded, opened

pytestmark = pytest.mark.anyio

HELLO = {"messages": QUESTION, "max_tokens": 20}
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2}'},
}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": "2 + 3?", "name": "Ann"},
        {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 0,
    "logit_bias": {},
    "stop": ["!"],
    "max_tokens": 20,
    "max_completion_tokens": 20,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "chat_template_kwargs": {"enable_thinking": False},
    "chat_template": None,
    "functions": [],
    "function_call": None,
    "modalities": ["text"],
    "audio": None,
    "return_token_ids": True,
    "seed": 1,
    "user": "x",
}
TEXT = {
    "model": "policy",
    "prompt": ["2 + 3 =", "3 + 4 ="],
    "n": 1,
    "stream": False,
    "logprobs": 0,
    "echo": False,
    "suffix": "",
    "best_of": 1,
    "stop": "!",
    "max_tokens": 20,
    "temperature": 1.0,
    "return_token_ids": True,
}
MESSAGES = {
    "model": "policy",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "Be short."}],
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me add."},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "5"},
                {"type": "text", "text": "So?"},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["!"],
    "stream": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 5,
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "x"},
}
VALUES = (
    "null",
    "true",
    "-1",
    "1e400",
    "NaN",
    "-Infinity",
    "1" * 400,
    "1" * 5000,
    str(2**63),
    str(2**31),
    "1e-300",
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"{{ 7 * 7 }}"',
    "[]",
    "{}",
    "[" * 900 + "]" * 900,
    "[" * 99_999 + "]" * 99_999,
    '{"a":' * 500 + "1" + "}" * 500,
    '{"\\udfff": 1}',
    '["\\udcff", 1, null]',
)


class Always(Script):
    """Says the same to everyone."""

    async def generate(self, token_ids, sampling, seed):
        self.requests.append((list(token_ids), sampling, seed))
        await asyncio.sleep(0)
        tokens = encoded("It is 5." + END)[: sampling.max_tokens]
        return Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens))


def places(value, path=()):
    """Every place in a body, also the whole of it."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


MARK = "@@hostile@@"


def body_with(body, path, value):
    """The JSON of a body that has this text in one place."""
    if not path:
        return value
    copy = json.loads(json.dumps(body))
    within = copy
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = MARK
    return json.dumps(copy).replace(f'"{MARK}"', value)


@asynccontextmanager
async def client_of(desk):
    headers = {"authorization": f"Bearer {desk.session.api_key}"}
    url = desk.session.base_url
    async with httpx.AsyncClient(
        verify=False, base_url=url, headers=headers, timeout=120
    ) as client:
        yield client


def is_refused_in_its_own_words(path, reply):
    """An error as OpenAI's or Anthropic's API has it, that their clients do not retry."""
    body = reply.json()
    if path == "/messages":
        told = body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    else:
        told = body["error"]["type"] == "invalid_request_error"
    known = reply.status_code in (400, 404, 413)
    return told and known and bool(body["error"]["message"]) and len(reply.content) < 2000


async def serves(client):
    reply = await client.post("/chat/completions", json=HELLO)
    return reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/chat/completions", CHAT), ("/completions", TEXT), ("/messages", MESSAGES)],
)
async def test_whatever_stands_in_a_field_is_answered_or_the_clients_mistake(path, body):
    async with opened(engine=Always()) as desk, client_of(desk) as client:
        whole = await client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        wrong = []
        for place in places(body):
            for value in VALUES:
                content = body_with(body, place, value)
                reply = await client.post(path, content=content)
                fine = reply.status_code == 200 and json.loads(
                    reply.text, parse_constant=lambda name: pytest.fail(name)
                )
                if not (fine or is_refused_in_its_own_words(path, reply)):
                    wrong.append((place, value[:40], reply.status_code, reply.text[:200]))
                assert desk.session.failure is None, (place, value[:40], desk.session.failure)
        assert not wrong, wrong[:5]
        assert await serves(client) == "It is 5."
    json.dumps(desk.rollout.to_dict(), allow_nan=False).encode()
