"""AgentServer under hostile requests: the client's mistake is the client's, and nobody else's."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from lightning_rl.agents.templates import HermesParser
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.limits import RequestLimits
from tests.support.served_chats import (
    END,
    QUESTION,
    TOKENIZER,
    TOOLS,
    Script,
    encoded,
    new_rollout,
    opened,
    until,
)

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
RESPONSE = {
    "model": "policy",
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Easy."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 20,
    "temperature": 1.0,
    "top_p": 1.0,
    "stream": False,
    "background": False,
    "truncation": "disabled",
    "previous_response_id": None,
    "metadata": {"a": "b"},
    "store": True,
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
        await self.may_write.wait()
        tokens = encoded("It is 5." + END)[: sampling.max_tokens]
        return Completion(tokens, [-0.5] * len(tokens), "stop", [7] * len(tokens))


def places(value, path=()):
    """Yield every place in a body, also the whole of it."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


MARK = "@@hostile@@"


def body_with(body, path, value):
    """Return the JSON of a body that has this text in one place."""
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


def is_answer(reply):
    """Tell whether it is 200, and JSON for any reader, in one piece or as events."""
    events = [line[5:] for line in reply.text.splitlines() if line.startswith("data:")]
    for text in events or [reply.text]:
        if text.strip() != "[DONE]":
            json.loads(text, parse_constant=lambda name: pytest.fail(name))
    return reply.status_code == 200


def is_refused_in_its_own_words(path, reply):
    """Tell whether it is an error in OpenAI's or Anthropic's form, which clients do not retry."""
    body = reply.json()
    if path == "/messages":
        kinds = ("invalid_request_error", "not_found_error", "request_too_large")
        told = body["type"] == "error" and body["error"]["type"] in kinds
    else:
        told = body["error"]["type"] == "invalid_request_error"
    known = reply.status_code in (400, 404, 413)
    return told and known and bool(body["error"]["message"]) and len(reply.content) < 2000


async def serves(client):
    reply = await client.post("/chat/completions", json=HELLO)
    return reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", TEXT),
        ("/messages", MESSAGES),
        ("/responses", RESPONSE),
    ],
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
                if not (is_answer(reply) or is_refused_in_its_own_words(path, reply)):
                    wrong.append((place, value[:40], reply.status_code, reply.text[:200]))
                assert desk.session.failure is None, (place, value[:40], desk.session.failure)
        assert not wrong, wrong[:5]
        assert await serves(client) == "It is 5."
    json.dumps(desk.rollout.to_dict(), allow_nan=False).encode()


# ---------------------------------------------------------------- beside the loop


async def test_nobody_waits_for_a_chat_that_takes_long_to_write(monkeypatch):
    """Rendering of one session's chat stands still; another session is answered meanwhile."""
    begun, may_end = threading.Event(), threading.Event()
    render = TOKENIZER.apply_chat_template

    def slow(messages, **options):
        if messages[-1]["content"] == "long":
            begun.set()
            assert may_end.wait(60)
        return render(messages, **options)

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", slow, raising=False)
    async with opened(engine=Always()) as desk, client_of(desk) as client:
        long = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 20}
        waiting = asyncio.create_task(client.post("/chat/completions", json=long))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        sampling, rollout = Sampling(max_tokens=20), new_rollout()
        async with desk.server.session(rollout, desk.engine, sampling) as other:
            answer = await other.chat(QUESTION)
        assert answer.text == "It is 5."
        assert not waiting.done()
        may_end.set()
        assert (await waiting).status_code == 200


async def test_what_takes_too_long_to_write_is_the_clients_mistake(monkeypatch):
    may_end = threading.Event()
    render = TOKENIZER.apply_chat_template

    def endless(messages, **options):
        if messages[-1]["content"] == "endless":
            may_end.wait(60)
        return render(messages, **options)

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", endless, raising=False)
    limits = RequestLimits(max_seconds=3)
    async with opened(engine=Always(), limits=limits) as desk, client_of(desk) as client:
        body = {"messages": [{"role": "user", "content": "endless"}]}
        reply = await client.post("/chat/completions", json=body)
        assert is_refused_in_its_own_words("/chat/completions", reply)
        assert "more than 3 s" in reply.text
        assert "limits.max_seconds" in reply.text
        assert await serves(client) == "It is 5."  # though the thread still hangs
        may_end.set()
        assert desk.session.failure is None
    assert len(desk.rollout.calls) == 1


async def test_calls_side_by_side_keep_their_order(monkeypatch):
    """The first takes longest to write, and is recorded first all the same."""
    render = TOKENIZER.apply_chat_template

    def slow_first(messages, **options):
        if messages[-1]["content"] == "0":
            time.sleep(0.05)
        return render(messages, **options)

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", slow_first, raising=False)
    async with opened(engine=Always()) as desk:
        chats = [[{"role": "user", "content": str(number)}] for number in range(4)]
        await asyncio.gather(*map(desk.session.chat, chats))
    rollout = desk.rollout
    read = [TOKENIZER.decode(rollout.prompt_of(call)) for call in rollout.calls]
    assert read == [render(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


async def test_what_was_written_is_kept_when_another_call_is_aborted_as_it_is_read():
    reading, may_end = threading.Event(), threading.Event()

    class Slow(HermesParser):
        def parse(self, text):
            reading.set()
            assert may_end.wait(60)
            return super().parse(text)

    class Aborts(Always):
        async def generate(self, token_ids, sampling, seed):
            completion = await super().generate(token_ids, sampling, seed)
            if "other" in TOKENIZER.decode(token_ids):
                await until(reading.is_set)
                completion.finish_reason = "abort"
            return completion

    async with opened(engine=Aborts(), parser=Slow()) as desk:
        other = [{"role": "user", "content": "other"}]
        calls = (desk.session.chat(QUESTION, tools=TOOLS), desk.session.chat(other))
        with pytest.raises(RequestError, match="interrupted"):
            await asyncio.gather(*calls)
    may_end.set()
    assert [(call.finish_reason, call.asked) for call in desk.rollout.calls] == [
        ("stop", True), ("abort", True),
    ]  # fmt: skip


# ---------------------------------------------------------------- templates of clients

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 9999999999 }}"
LONG = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": ENDLESS},
        {"chat_template_kwargs": {"chat_template": ENDLESS}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
@pytest.mark.parametrize("client_templates", [False, True])
async def test_only_variables_are_given_to_the_models_template(fields, client_templates):
    limits = RequestLimits(client_templates=client_templates, max_seconds=0.5)
    async with opened(engine=Always(), limits=limits) as desk, client_of(desk) as client:
        reply = await client.post("/chat/completions", json=HELLO | fields)
        assert is_refused_in_its_own_words("/chat/completions", reply)
        assert await serves(client) == "It is 5."


async def test_a_clients_template_is_used_where_that_is_allowed():
    limits = RequestLimits(client_templates=True)
    template = "{% for m in messages %}<{{ m.content }}{{ eos_token }}>{% endfor %}{{ more }}"
    fields = {"chat_template": template, "chat_template_kwargs": {"more": "!"}}
    async with opened(engine=Always(), limits=limits) as desk:
        first = await desk.session.chat(QUESTION, **fields)
        chat = [*QUESTION, first.message, {"role": "user", "content": "Sure?"}]
        await desk.session.chat(chat, **fields)
    begun = f"<What is 2 + 3?{END}>!"
    assert desk.asked == [begun, f"{begun}It is 5.{END}><Sure?{END}>!"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (ENDLESS, "more than 1 s"),
        (HUGE, "MemoryError"),
        (LONG, "more than 65536 bytes"),
        ("{{ nobody.knows.this }}", "UndefinedError"),
        ("{% if", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
async def test_a_clients_template_breaks_nothing_where_it_is_allowed(template, says):
    seconds = 1 if template == ENDLESS else 60
    limits = RequestLimits(client_templates=True, max_seconds=seconds, max_bytes=2**16)
    async with opened(engine=Always(), limits=limits) as desk, client_of(desk) as client:
        reply = await client.post("/chat/completions", json=HELLO | {"chat_template": template})
        assert is_refused_in_its_own_words("/chat/completions", reply)
        assert says in reply.text
        assert await serves(client) == "It is 5."


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(("count", "prompts"), [(4, 1), (2, 2), (1, 4)])
async def test_a_request_asks_for_so_many_answers_at_most(count, prompts):
    async with (
        opened(engine=Always(), limits=RequestLimits(max_answers=3)) as desk,
        client_of(desk) as client,
    ):
        body = {"prompt": ["2 + 3 ="] * prompts, "n": count, "max_tokens": 20}
        reply = await client.post("/completions", json=body)
        assert is_refused_in_its_own_words("/completions", reply)
        assert "limits.max_answers" in reply.text
        assert reply.json()["error"]["param"] == "n"
        assert not desk.engine.requests
        fewer = await client.post("/completions", json=body | {"n": 1, "prompt": ["1"] * 3})
        assert len(fewer.json()["choices"]) == 3


async def test_a_body_has_so_many_bytes_at_most():
    async with (
        opened(engine=Always(), limits=RequestLimits(max_bytes=10_000)) as desk,
        client_of(desk) as client,
    ):
        for path in ("/chat/completions", "/messages"):
            reply = await client.post(path, json=HELLO | {"user": "x" * 1_000_000})
            assert reply.status_code == 413
            assert is_refused_in_its_own_words(path, reply)
            assert "takes 10000 at most" in reply.text
            assert "limits.max_bytes" in reply.text
        assert await serves(client) == "It is 5."


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_bytes": 0},
        {"max_answers": 0},
        {"max_seconds": 0.0},
        {"max_wait_s": 0.0},
        {"max_seconds": float("nan")},
    ],
)
def test_limits_that_let_nothing_through_are_refused(bounds):
    with pytest.raises(ConfigError, match=next(iter(bounds))):
        RequestLimits(**bounds)


async def test_a_key_stands_for_one_request():
    async with opened(engine=Always()) as desk, client_of(desk) as client:
        key = {"idempotency-key": "k"}
        first = await client.post("/chat/completions", json=HELLO, headers=key)
        again = await client.post("/chat/completions", json=HELLO, headers=key)
        assert first.json()["choices"] == again.json()["choices"]
        assert len(desk.engine.requests) == 1
        for path, body in (
            ("/chat/completions", HELLO | {"n": 2}),
            ("/chat/completions", HELLO | {"stream": True}),
            ("/messages", {**HELLO, "model": "policy"}),
            ("/completions", {"prompt": "2 + 3"}),
        ):
            reply = await client.post(path, json=body, headers=key)
            assert is_refused_in_its_own_words(path, reply)
            assert "'k' was sent with another request" in reply.text
        assert desk.session.failure is None
        assert await serves(client) == "It is 5."


# ---------------------------------------------------------------- what the model writes


@pytest.mark.parametrize(
    "arguments",
    ["NaN", "-Infinity", "1e999", '"\\ud800"', "[" * 70 + "]" * 70, "[" * 5000 + "]" * 5000],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_call_that_no_client_could_read_is_text(arguments, path):
    wrote = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {arguments}}}}}\n</tool_call>'
    tools = {"/chat/completions": TOOLS, "/messages": MESSAGES["tools"]}
    async with opened(wrote + END) as desk, client_of(desk) as client:
        body = {"model": "policy", "max_tokens": 20_000, "messages": QUESTION}
        reply = await client.post(path, json=body | {"tools": tools[path]})
        assert is_answer(reply)
        assert "tool_calls" not in reply.text
    assert desk.session.messages[-1]["content"] == wrote


# ---------------------------------------------------------------- connections


async def raw(desk, sent):
    """Return what comes back for these bytes until the server closes the connection."""
    host, port = desk.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/chat",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n9\r\n",
    ],
    ids=["nothing", "no line", "no end of the headers", "no body", "no end of a chunk"],
)
async def test_who_sends_no_whole_request_is_told_and_closed(sent):
    limits = RequestLimits(max_wait_s=0.2)
    async with opened(engine=Always(), limits=limits) as desk:
        said = await raw(desk, sent)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"limits.max_wait_s" in said
        async with client_of(desk) as client:
            assert await serves(client) == "It is 5."


async def test_a_slow_trickle_of_headers_is_closed_too():
    async with opened(engine=Always(), limits=RequestLimits(max_wait_s=0.3)) as desk:
        host, port = desk.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\n")
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(60):
            while not reading.done():
                writer.write(b"x-a: b\r\n")
                await asyncio.sleep(0.02)
        assert (await reading).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_headers_have_an_end():
    async with opened(engine=Always()) as desk:
        said = await raw(desk, b"GET /v1/models HTTP/1.1\r\n" + b"x-a: " + b"b" * 300_000)
        assert said.startswith(b"HTTP/1.1 431 ")
        assert b"65536 bytes" in said


async def test_a_stranger_is_told_of_the_key_and_closed_however_much_it_sends():
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n"
    async with opened(engine=Always()) as desk:
        said = await raw(desk, head + b"x" * 3_000_000)
        assert said.startswith(b"HTTP/1.1 401 ")
        assert b"Incorrect API key" in said


async def test_who_has_a_key_may_keep_its_connection_and_wait_for_an_answer():
    async with opened(engine=Always(), limits=RequestLimits(max_wait_s=0.1)) as desk:
        desk.engine.may_write.clear()
        host, port = desk.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(HELLO).encode()
        key = desk.session.api_key.encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key
        request = head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        for _ in range(2):
            writer.write(request)
            await asyncio.sleep(0.3)  # longer than a request may take to come
            desk.engine.may_write.set()
            line = await asyncio.wait_for(reader.readline(), 60)
            assert line.startswith(b"HTTP/1.1 200 ")
            while (header := await reader.readline()) != b"\r\n":
                if header.startswith(b"content-length"):
                    length = int(header.split(b":")[1])
            await reader.readexactly(length)
            await asyncio.sleep(0.3)
        writer.close()
