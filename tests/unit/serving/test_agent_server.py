"""Test AgentServer: real clients over HTTP; what they read, and what is recorded of it."""

import asyncio
import json
import random
from dataclasses import replace

import anthropic
import httpx
import openai
import pytest

from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.engines.sampling import Completion, Sampling, StructuredOutputs
from lightning_rl.errors import ConfigError, EngineError, ServerRefusal
from lightning_rl.rollout import SamplingDistribution
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.server import AgentServer
from tests.support.engine_checks import FakeEngine
from tests.support.served_chats import (
    ADD,
    END,
    QUESTION,
    TOKENIZER,
    TOOLS,
    Desk,
    Script,
    encoded,
    new_rollout,
    opened,
    until,
)
from tests.support.tiny_models import chat_tokenizer

pytestmark = pytest.mark.anyio

CALLS = 'Let me add. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def render(messages, **options):
    return TurnTemplate(TOKENIZER, options).render(messages)


# ---------------------------------------------------------------- chats


async def test_a_chat_is_answered_and_recorded():
    async with opened("It is 5." + END) as desk:
        answer = await desk.chat()
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "It is 5.")
    assert (choice.finish_reason, answer.model) == ("stop", "policy")
    assert desk.asked == [render(QUESTION)]
    prompt, wrote = encoded(render(QUESTION)), encoded("It is 5." + END)
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert usage == (len(prompt), len(wrote))
    (row,) = desk.rollout.rows[1:]
    assert (row.prompt_ids, row.token_ids) == (prompt, wrote)
    assert row.loss_mask == [True] * len(wrote)
    assert row.logprobs == [-0.5 - i for i in range(len(wrote))]
    assert row.versions == [7] * len(wrote)
    assert desk.session.messages == [{"role": "assistant", "content": "It is 5."}]


def as_object(message):
    return message


def as_dump(message):
    return message.model_dump()


def as_little(message):
    return message.model_dump(exclude_none=True)


def as_blocks(message):
    """Return text in blocks, calls with an index, other arguments, and other servers' fields."""
    given = message.model_dump(exclude_none=True)
    given["content"] = [{"type": "text", "text": given.get("content", "")}]
    for index, call in enumerate(given.get("tool_calls", [])):
        call["index"] = index
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    return given | {"reasoning_content": None, "audio": None, "tool_calls": given.get("tool_calls")}


@pytest.mark.parametrize("sent_back", [as_object, as_dump, as_little, as_blocks])
async def test_calls_and_results_go_on_from_the_tokens_that_were_written(sent_back):
    async with opened(CALLS + END, "It is 5." + END, "Bye." + END) as desk:
        first = (await desk.chat(tools=TOOLS)).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me add.")
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        chat = [*QUESTION, sent_back(first.message), result]
        second = (await desk.chat(chat, tools=TOOLS)).choices[0].message
        assert second.content == "It is 5."
        chat += [sent_back(second), {"role": "user", "content": "Thanks."}]
        await desk.chat(chat, tools=TOOLS)
    opening = "<|im_start|>assistant\n"
    answered = f"\n<|im_start|>user\n<tool_response>\n5\n</tool_response>{END}\n{opening}"
    thanks = f"\n<|im_start|>user\nThanks.{END}\n{opening}"
    prompt = render(QUESTION, tools=TOOLS)
    assert desk.asked == [
        prompt,
        prompt + CALLS + END + answered,
        prompt + CALLS + END + answered + "It is 5." + END + thanks,
    ]
    (row,) = desk.rollout.rows[1:]
    assert desk.written == [CALLS + END, "It is 5." + END, "Bye." + END]
    given = [t for t, mine in zip(row.token_ids, row.loss_mask, strict=True) if not mine]
    assert TOKENIZER.decode(given) == answered + thanks
    assert [m["role"] for m in desk.session.messages] == [
        "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip


async def test_tokens_that_no_text_leads_to_are_kept():
    """An end token in the middle, and a character cut in half: their text encodes otherwise."""

    class Odd(Script):
        async def generate(self, token_ids, sampling, seed):
            completion = await super().generate(token_ids, sampling, seed)
            if len(self.requests) == 1:
                completion.token_ids[3:5] = [TOKENIZER.pad_token_id, encoded("ä")[0]]
            return completion

    async with opened(engine=Odd("It is 5." + END, "Bye." + END)) as desk:
        first = (await desk.chat()).choices[0].message
        await desk.chat([*QUESTION, first, {"role": "user", "content": "Sure?"}])
    wrote = desk.engine.requests[1][0][len(encoded(render(QUESTION))) :]
    assert wrote[3:5] == [TOKENIZER.pad_token_id, encoded("ä")[0]]
    assert encoded(first.content)[3:5] != wrote[3:5]
    assert len(desk.rollout.rows[1:]) == 1
    assert [call.row for call in desk.rollout.calls] == [1, 1]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
async def test_a_chat_goes_on_as_its_template_would_write_it(name):
    tokenizer = chat_tokenizer(name)
    turn = [tokenizer.encode(text, add_special_tokens=False) for text in ("One.", "Two.")]
    end = [tokenizer.eos_token_id]

    class Said(Script):
        async def generate(self, token_ids, sampling, seed):
            self.requests.append(token_ids)
            tokens = turn[len(self.requests) - 1] + end
            return Completion(tokens, [0.0] * len(tokens), "stop", [0] * len(tokens))

    engine, chat = Said(), [{"role": "system", "content": "Be brief."}, *QUESTION]
    server = AgentServer(tokenizer)
    async with server.session(new_rollout(), engine, Sampling(max_tokens=99)) as session:
        for _ in range(2):
            answer = await session.chat(chat)
            chat += [answer.message, {"role": "user", "content": "Go on."}]
    await server.close()
    second = TurnTemplate(tokenizer).render(chat[:4])
    assert list(engine.requests[1]) == tokenizer.encode(second, add_special_tokens=False)


async def test_an_edited_history_begins_a_row():
    async with opened("It is 5." + END, "Right." + END, "Hm." + END) as desk:
        first = (await desk.chat()).choices[0].message
        edited = {"role": "assistant", "content": "It is 6."}
        more = {"role": "user", "content": "Sure?"}
        await desk.chat([*QUESTION, edited, more])
        await desk.chat([*QUESTION, first, more], tools=TOOLS)  # the template shows them first
    assert desk.asked[1] == render([*QUESTION, edited, more])
    assert [call.row for call in desk.rollout.calls] == [1, 2, 3]
    assert all(all(row.loss_mask) for row in desk.rollout.rows[1:])


async def test_a_turn_that_was_cut_off_is_gone_on_from():
    async with opened("It is 5." + END, "Bye." + END) as desk:
        first = (await desk.chat(max_tokens=5)).choices[0]
        assert (first.finish_reason, first.message.content) == ("length", "It is")
        await desk.chat([*QUESTION, first.message, {"role": "user", "content": "Go on."}])
    assert desk.asked[1].startswith(render(QUESTION) + "It is" + END + "\n<|im_start|>user\nGo on.")
    assert len(desk.rollout.rows[1:]) == 1


async def test_a_stop_string_is_kept_in_the_tokens_and_not_in_the_message():
    async with opened("It is 5.\nObservation: 7", "Bye." + END) as desk:
        first = (await desk.chat(stop="\nObservation")).choices[0]
        assert (first.finish_reason, first.message.content) == ("stop", "It is 5.")
        await desk.chat([*QUESTION, first.message, {"role": "user", "content": "Go on."}])
    assert desk.engine.requests[0][1].stop == ["\nObservation"]
    assert desk.asked[1].startswith(render(QUESTION) + "It is 5.\nObservation" + END)
    assert len(desk.rollout.rows[1:]) == 1


async def test_several_answers_are_samples_of_their_own():
    async with opened("One." + END, "Two." + END, "Three." + END, "Four." + END) as desk:
        answer = await desk.chat(n=3)
        texts = [choice.message.content for choice in answer.choices]
        assert sorted(texts) == ["One.", "Three.", "Two."]
        second = [*QUESTION, answer.choices[1].message, {"role": "user", "content": "More."}]
        await desk.chat(second)
    assert len({seed for _, _, seed in desk.engine.requests}) == 4
    assert desk.asked[3].startswith(render(QUESTION) + texts[1] + END)
    rows = [call.row for call in desk.rollout.calls]
    assert rows[3] == rows[1]
    assert answer.usage.prompt_tokens == len(encoded(render(QUESTION)))


async def test_logprobs_and_token_ids_are_the_engines():
    async with opened("Hi" + END) as desk:
        answer = await desk.chat(logprobs=True, extra_body={"return_token_ids": True})
    tokens = [(t.token, t.logprob, bytes(t.bytes)) for t in answer.choices[0].logprobs.content]
    assert tokens == [("H", -0.5, b"H"), ("i", -1.5, b"i"), (END, -2.5, END.encode())]
    assert answer.choices[0].token_ids == encoded("Hi" + END)
    assert answer.choices[0].prompt_token_ids == encoded(render(QUESTION))


async def test_a_stream_says_what_the_whole_answer_does():
    text = "Words and more words, äöü, until it is longer than a chunk. "
    async with opened(text + CALLS + END) as desk:
        stream = await desk.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        call = desk.session.messages[0]["tool_calls"][0]
    *parts, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in parts]
    assert deltas[0].role == "assistant"
    assert len([d for d in deltas if d.content]) > 1
    assert "".join(d.content or "" for d in deltas) == (text + "Let me add.").strip()
    told = [d.tool_calls[0] for d in deltas if d.tool_calls]
    assert (told[0].id, told[0].function.name, told[0].index) == (call["id"], "add", 0)
    arguments = "".join(t.function.arguments for t in told)
    assert json.loads(arguments) == {"a": 2, "b": 3}
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len(encoded(text + CALLS + END))
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_call_that_cannot_be_read_is_text_and_a_second_one_is_left_out_on_request():
    broken, two = '<tool_call>{"name": "add"' + END, CALLS + CALLS.replace("2", "7") + END
    async with opened(broken, two, two, CALLS + END) as desk:
        first = (await desk.chat(tools=TOOLS)).choices[0]
        assert (first.message.content, first.message.tool_calls) == (broken.removesuffix(END), None)
        assert first.finish_reason == "stop"
        both = (await desk.chat(tools=TOOLS)).choices[0].message.tool_calls
        assert [call.id for call in both] == ["call00000", "call00001"]
        one = await desk.chat(tools=TOOLS, parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls) == 1
        none = (await desk.chat(tools=TOOLS, tool_choice="none")).choices[0]
        assert (none.message.content, none.finish_reason) == (CALLS, "stop")


async def test_a_tool_that_must_be_called_is_held_to_its_form():
    named = {"type": "function", "function": {"name": "add"}}
    any_of = [{"name": "add", "parameters": {"a": 1, "b": 2}}]
    async with opened('{"a": 1, "b": 2}' + END, json.dumps(any_of) + END, "Bye." + END) as desk:
        first = (await desk.chat(tools=TOOLS, tool_choice=named)).choices[0]
        second = (await desk.chat(tools=TOOLS, tool_choice="required")).choices[0]
        assert (first.finish_reason, second.finish_reason) == ("stop", "tool_calls")
        for choice in (first, second):
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "add",
                {"a": 1, "b": 2},
            )
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        await desk.chat([*QUESTION, second.message, result], tools=TOOLS)
    forms = [sampling.structured_outputs for _, sampling, _ in desk.engine.requests]
    assert forms[0] == StructuredOutputs(json=ADD["parameters"])
    assert forms[1].json["items"]["anyOf"][0]["properties"]["name"] == {"const": "add"}
    assert forms[2] is None
    assert desk.asked[2].startswith(render(QUESTION, tools=TOOLS) + json.dumps(any_of) + END)


async def test_forms_and_settings_reach_the_engine():
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    run = Sampling(max_tokens=50, temperature=0.7, top_k=9, min_tokens=2, stop=["run"])
    async with opened(*["Hi" + END] * 4, sampling=run) as desk:
        await desk.chat(response_format=wanted)
        await desk.chat(temperature=0.3, top_p=0.9, presence_penalty=1.5, seed=4, user="me")
        await desk.chat(max_completion_tokens=1, extra_body={"top_k": -1, "min_p": 0.1})
        await desk.chat()
    assert [sampling for _, sampling, _ in desk.engine.requests] == [
        replace(run, structured_outputs=StructuredOutputs(json=schema)),
        replace(run, temperature=0.3, top_p=0.9, presence_penalty=1.5),
        replace(run, max_tokens=1, min_tokens=1, top_k=0, min_p=0.1),
        run,
    ]
    assert desk.rollout.rows[2].sampling == SamplingDistribution(
        temperature=0.3, top_p=0.9, top_k=9, presence_penalty=1.5, min_tokens=2
    )


async def test_a_run_may_keep_its_own_distribution():
    run = Sampling(max_tokens=50, temperature=0.7)
    async with opened("Hi" + END, sampling=run, client_sampling=False) as desk:
        await desk.chat(temperature=0.0, top_p=0.1, frequency_penalty=1.0, max_tokens=9)
    assert desk.engine.requests[0][1] == replace(run, max_tokens=9)


async def test_a_model_is_a_role():
    async with opened("A." + END, "B." + END, roles=["critic"]) as desk:
        assert [model.id async for model in desk.openai.models.list()] == ["policy", "critic"]
        await desk.chat()
        await desk.openai.chat.completions.create(model="critic", messages=QUESTION)
    assert [row.role for row in desk.rollout.rows[1:]] == ["", "critic"]


async def test_no_more_is_generated_than_there_is_room_for():
    prompt = len(encoded(render(QUESTION)))
    async with opened(engine=Script("It is 5." + END, max_length=prompt + 3)) as desk:
        assert (await desk.chat(max_tokens=99)).choices[0].message.content == "It "
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await desk.chat([{"role": "user", "content": "What is 2 + 3, or 3 + 2?"}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert len(desk.engine.requests) == 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("request_", "kind", "param", "code"),
    [
        ({"messages": []}, openai.BadRequestError, "messages", "empty_array"),
        ({"messages": "Hi"}, openai.BadRequestError, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content", None),
        ({"messages": [{"role": "me", "content": ""}]}, openai.BadRequestError,
         "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         openai.BadRequestError, "messages[0].content[0].type", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "5"}]}, openai.BadRequestError,
         "messages[0].tool_call_id", "missing_required_parameter"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "invalid_type"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", None),
        ({"stop": [1]}, openai.BadRequestError, "stop", "invalid_type"),
        ({"n": 0}, openai.BadRequestError, "n", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 3}, openai.BadRequestError, "top_logprobs",
         "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias", "unsupported_parameter"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", None),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools[0].function",
         "missing_required_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
         openai.BadRequestError, "tool_choice", None),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type",
         "invalid_value"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_as_openai_does(request_, kind, param, code):
    async with opened() as desk:
        given = {"model": "policy", "messages": QUESTION} | request_
        with pytest.raises(kind) as caught:
            await desk.openai.chat.completions.create(**given)
    assert caught.value.param == param
    assert code is None or caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert desk.engine.requests == []
    assert desk.rollout.calls == []


async def test_what_is_no_request_is_refused():
    async with opened() as desk:
        async with httpx.AsyncClient(verify=False) as client:
            url = desk.session.base_url + "/chat/completions"
            key = {"authorization": f"Bearer {desk.session.api_key}"}
            broken = await client.post(url, content=b"{", headers=key)
            listed = await client.post(url, content=b"[]", headers=key)
            unknown = await client.get(desk.session.base_url + "/nothing", headers=key)
            wrong = await client.get(url, headers=key)
            keyless = await client.post(url, json={})
        assert (broken.status_code, listed.status_code) == (400, 400)
        assert "valid JSON" in broken.json()["error"]["message"]
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
        assert wrong.status_code == 404
        assert (keyless.status_code, keyless.json()["error"]["code"]) == (401, "invalid_api_key")
        stranger = desk.openai.with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("sampling.structured_outputs is not supported by this engine"),
        ServerRefusal("/generate answered 400: not supported by this engine", 400),
    ],
)
async def test_what_an_engine_cannot_do_is_the_clients_to_change(error):
    async with opened(error, "Hi" + END) as desk:
        with pytest.raises(openai.BadRequestError, match="not supported by this engine"):
            await desk.chat(response_format={"type": "json_object"})
        assert (await desk.chat()).choices[0].message.content == "Hi"


def test_servers_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="port=70000"):
        AgentServer(TOKENIZER, port=70000)


async def test_two_servers_cannot_share_a_port():
    first = AgentServer(TOKENIZER)
    await first.start()
    await first.start()
    port = int(first.url.rpartition(":")[2])
    second = AgentServer(TOKENIZER, port=port)
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
        await second.start()
    await first.close()
    await first.close()
    with pytest.raises(ConfigError, match="is not listening"):
        _ = first.url


# ---------------------------------------------------------------- lost answers, failures, ends


BODY = {"model": "policy", "messages": QUESTION}


async def ask_and_leave(desk, path, **body):
    """Hang up as soon as the engine has the question."""
    asking = asyncio.create_task(desk.post(path, **body))
    await until(lambda: desk.engine.requests)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_answer_is_given_to_whoever_asks_again(stream):
    async with opened("One." + END, "Two." + END) as desk:
        body = BODY | {"stream": stream}
        desk.engine.may_write.clear()
        await ask_and_leave(desk, "/chat/completions", **body)
        again = asyncio.create_task(desk.post("/chat/completions", **body))
        await asyncio.sleep(0.1)
        assert len(desk.engine.requests) == 1  # it waits for what is being written
        desk.engine.may_write.set()
        assert "One." in (await again).text
        assert desk.written == ["One." + END]
        # It has arrived, so the same once more is another question.
        assert "Two." in (await desk.post("/chat/completions", **body)).text
    assert desk.written == ["One." + END, "Two." + END]


async def test_an_answer_to_nobody_waits_for_a_retry():
    async with opened("One." + END, "Two." + END) as desk:
        desk.engine.may_write.clear()
        await ask_and_leave(desk, "/chat/completions", **BODY)
        await until(lambda: not desk.server._connections)
        desk.engine.may_write.set()
        await until(lambda: desk.written == ["One." + END])
        assert "One." in (await desk.post("/chat/completions", **BODY)).text
        assert "Two." in (await desk.post("/chat/completions", **BODY)).text
    assert len(desk.rollout.calls) == 2


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_an_answer_that_nobody_ever_got_is_not_trained_on(path):
    async with opened("One." + END, "Two." + END) as desk:
        desk.engine.may_write.clear()
        await ask_and_leave(desk, path, **BODY, prompt="Count:")
        await until(lambda: not desk.server._connections)
        desk.engine.may_write.set()
        await until(lambda: desk.written)
        assert (await desk.chat([*QUESTION, *QUESTION])).choices[0].message.content == "Two."
        said = [m["content"] for m in desk.session.messages if m["role"] == "assistant"]
        assert said == ["Two."]
        desk.session.episode.end()
    assert desk.written == ["Two." + END]
    assert desk.rollout.dropped == len(encoded("One." + END))


async def test_clients_that_say_that_they_retry_get_the_same():
    async with opened("One." + END, "Two." + END, "Three." + END) as desk:
        texts = []
        for headers in (
            {"x-stainless-retry-count": "0"},
            {"x-stainless-retry-count": "1"},
            {"idempotency-key": "a"},
            {"idempotency-key": "a"},
            {"idempotency-key": "b"},
        ):
            told = await desk.post("/chat/completions", headers=headers, **BODY)
            texts.append(told.json()["choices"][0]["message"]["content"])
    assert texts == ["One.", "One.", "Two.", "Two.", "Three."]
    assert len(desk.rollout.calls) == 3


async def test_a_library_that_times_out_and_retries_asks_once():
    async with opened("One." + END) as desk:
        desk.engine.may_write.clear()
        client = desk.openai.with_options(timeout=0.3, max_retries=20)
        asking = asyncio.create_task(client.chat.completions.create(**BODY))
        await asyncio.sleep(0.5)
        desk.engine.may_write.set()
        assert (await asking).choices[0].message.content == "One."
    assert len(desk.engine.requests) == 1


async def test_an_engine_that_fails_is_the_runs_error():
    failure = EngineError("the engine was closed")
    engine = Script(failure, "Hi" + END)

    async def program():
        async with opened(engine=engine) as desk:
            with pytest.raises(openai.InternalServerError) as told:
                await desk.openai.with_options(max_retries=2).chat.completions.create(**BODY)
            assert told.value.code == "engine_error"
            assert desk.rollout.calls == []

    with pytest.raises(EngineError) as caught:
        await program()
    assert caught.value is failure
    assert len(engine.requests) == 1  # the client was told not to retry


async def test_an_agent_that_fails_with_the_engine_is_not_to_blame():
    failure = EngineError("the engine was closed")

    async def program():
        async with opened(failure) as desk:
            await desk.session.chat(QUESTION)

    with pytest.raises(EngineError) as caught:
        await program()
    assert caught.value is failure
    assert isinstance(caught.value.__cause__, RequestError)


async def test_of_several_answers_all_arrive_or_none():
    async with opened(ConfigError("cannot"), "Two." + END, "Three." + END) as desk:
        with pytest.raises(openai.BadRequestError, match="cannot"):
            await desk.chat(n=2)
        await desk.chat([*QUESTION, *QUESTION])
        desk.session.episode.end()
    assert desk.written == ["Three." + END]


async def test_an_engine_that_aborts_ends_the_rollout():
    class Aborting(Script):
        async def generate(self, token_ids, sampling, seed):
            return Completion([], [], "abort", [])

    async with opened(engine=Aborting()) as desk:
        with pytest.raises(openai.InternalServerError, match="interrupted"):
            await desk.chat()
        assert desk.session.aborted


async def test_a_session_ends_with_what_is_under_way():
    server, engine = AgentServer(TOKENIZER), Script("One." + END, "Two." + END)
    engine.may_write.clear()
    async with server.session(new_rollout(), engine, Sampling(max_tokens=99)) as session:
        desk = Desk(session, engine)
        asking = asyncio.create_task(desk.chat())
        await until(lambda: engine.requests)
    with pytest.raises(openai.InternalServerError) as caught:
        await asking
    assert (caught.value.status_code, caught.value.code) == (503, "session_over")
    assert engine.cancelled == 1
    with pytest.raises(openai.InternalServerError, match="is over"):
        await desk.chat()
    with pytest.raises(RequestError, match="is over"):
        await session.chat(QUESTION)
    engine.may_write.set()
    async with server.session(new_rollout(), engine, Sampling(max_tokens=99)) as session:
        assert (await Desk(session, engine).chat()).choices[0].message.content == "Two."
    await server.close()


async def test_sessions_are_kept_apart():
    class Echo(FakeEngine):
        async def generate(self, token_ids, sampling, seed):
            await asyncio.sleep(0)
            tokens = encoded(f"{seed}{END}")
            return Completion(tokens, [0.0] * len(tokens), "stop", [0] * len(tokens))

    server = AgentServer(TOKENIZER)
    limits = httpx.Limits(max_connections=None)

    async def play(number, client):
        rollout = new_rollout()
        rollout.seed = number
        async with server.session(rollout, Echo(), Sampling(max_tokens=99)) as session:
            chat = list(QUESTION)
            key = {"authorization": f"Bearer {session.api_key}"}
            for _ in range(2):
                url = session.base_url + "/chat/completions"
                told = await client.post(url, json={"messages": chat}, headers=key, timeout=60)
                chat += [told.json()["choices"][0]["message"], QUESTION[0]]
        said = [m["content"] for m in chat if m["role"] == "assistant"]
        assert said == [str(call.seed) for call in rollout.calls]
        assert len(rollout.rows[1:]) == 1
        return said

    async with httpx.AsyncClient(verify=False, limits=limits) as client:
        played = await asyncio.gather(*(play(number, client) for number in range(60)))
    assert len({text for said in played for text in said}) == 120
    await server.close()


async def test_a_program_run_again_gets_what_the_rollout_holds():
    async with opened(CALLS + END, "It is 5." + END) as desk:

        async def program(session):
            first = await session.chat(QUESTION, tools=TOOLS)
            call = first.message["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            return await session.chat([*QUESTION, first.message, result], tools=TOOLS)

        await program(desk.session)
    before = desk.rollout.to_dict()
    server = AgentServer(TOKENIZER)
    async with server.session(desk.rollout, Script(), Sampling(max_tokens=5000)) as session:
        answer = await program(session)
        assert answer.text == "It is 5."
    await server.close()
    assert desk.rollout.to_dict() == before


# ---------------------------------------------------------------- random programs


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_a_program_sends_each_answer_is_recorded_once(seed):
    """Conversations that go on, branch, are edited and cut, with and without tools."""
    rng = random.Random(seed)

    class Random(FakeEngine):
        max_length = 100_000

        def __init__(self):
            self.made = []

        async def generate(self, token_ids, sampling, seed):
            await asyncio.sleep(0)
            draw = random.Random(f"{seed}{token_ids}")
            tokens = draw.choices(range(5, len(TOKENIZER)), k=draw.randint(1, 9))
            if draw.random() < 0.3:
                tokens = encoded(CALLS)
            tokens += [TOKENIZER.eos_token_id]
            logprobs = [-draw.random() for _ in tokens]
            completion = Completion(tokens, logprobs, "stop", [3] * len(tokens))
            self.made.append((tuple(token_ids), completion))
            return completion

    engine = Random()
    async with opened(engine=engine) as desk:
        chats, answers = [list(QUESTION)], []
        for _ in range(12):
            chat = list(rng.choice(chats))
            if rng.random() < 0.2:
                place = rng.randrange(len(chat))
                chat[place] = {"role": "user", "content": f"Edited {rng.random()}"}
            if rng.random() < 0.2:
                chat = chat[:1]
            tools = TOOLS if rng.random() < 0.7 else []
            told = await desk.session.chat(chat, tools=tools)
            answers.append(told)
            reply = [{"role": "user", "content": f"Say {rng.random()}"}]
            for call in told.message.get("tool_calls", ()):
                reply.insert(0, {"role": "tool", "tool_call_id": call["id"], "content": "5"})
            chats.append([*chat, told.message, *reply])
    rows = desk.rollout.rows
    recorded = []
    for call in desk.rollout.calls:
        row = rows[call.row]
        span = slice(call.start, call.stop)
        assert all(row.loss_mask[span])
        prompt = tuple(row.prompt_ids + row.token_ids[: call.start])
        recorded.append((prompt, tuple(row.token_ids[span]), tuple(row.logprobs[span])))
    made = [(prompt, tuple(c.token_ids), tuple(c.logprobs)) for prompt, c in engine.made]
    assert sorted(recorded) == sorted(made)
    trained = sum(sum(row.loss_mask) for row in rows)
    assert trained == sum(len(tokens) for _, tokens, _ in made)
    assert [(tuple(a.prompt_ids), a.completion) for a in answers] == engine.made


# ---------------------------------------------------------------- plain completions


async def test_a_plain_prompt_is_completed():
    async with opened("5", "6", "7", "8") as desk:
        create = desk.openai.completions.create
        first = await create(model="policy", prompt="2 + 3 =", logprobs=0, max_tokens=4)
        ids = await create(model="policy", prompt=encoded("2 + 4 ="))
        many = await create(model="policy", prompt=["a", "b"], max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="ids below"):
            await create(model="policy", prompt=[5, 10**6])
        with pytest.raises(openai.BadRequestError, match="echo=True"):
            await create(model="policy", prompt="a", echo=True)
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("5", "stop")
    assert first.choices[0].logprobs.tokens == ["5"]
    assert first.choices[0].logprobs.token_logprobs == [-0.5]
    assert ids.choices[0].text == "6"
    assert [choice.text for choice in many.choices] == ["7", "8"]
    assert desk.asked == ["2 + 3 =", "2 + 4 =", "a", "b"]


async def test_a_plain_prompt_is_streamed():
    text = "A text that is longer than one chunk of the stream."
    async with opened(text) as desk:
        stream = await desk.openai.completions.create(model="policy", prompt="Go", stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == text
    assert [choice.finish_reason for choice in choices] == [None, None, "stop"]


# ---------------------------------------------------------------- Anthropic's messages


CLAUDES = [{"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}]


async def test_anthropics_messages_go_on_from_the_tokens_that_were_written():
    async with opened(CALLS + END, "It is 5." + END) as desk:
        create = desk.anthropic.messages.create
        options = {"model": "policy", "max_tokens": 500, "system": "Be brief.", "tools": CLAUDES}
        first = await create(messages=QUESTION, **options)
        text, call = first.content
        assert (text.text, call.name, call.input) == ("Let me add.", "add", {"a": 2, "b": 3})
        assert (first.stop_reason, first.usage.output_tokens) == (
            "tool_use",
            len(encoded(CALLS + END)),
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
        chat = [
            *QUESTION,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = await create(messages=chat, **options)
    assert (second.content[0].text, second.stop_reason) == ("It is 5.", "end_turn")
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert desk.asked[0] == render(system, tools=TOOLS)
    assert desk.asked[1].startswith(desk.asked[0] + CALLS + END + "\n<|im_start|>user\n<tool_resp")
    assert [call.row for call in desk.rollout.calls] == [1, 1]


async def test_anthropics_stream_says_what_the_whole_answer_does():
    asked = {"model": "policy", "max_tokens": 500, "messages": QUESTION, "tools": CLAUDES}
    async with opened(CALLS + END) as desk, desk.anthropic.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    text, call = message.content
    assert (text.text, call.input, message.stop_reason) == (
        "Let me add.",
        {"a": 2, "b": 3},
        "tool_use",
    )
    assert message.usage.output_tokens == len(encoded(CALLS + END))
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_anthropics_settings_reach_the_engine():
    async with opened("It is 5. Done", '{"a": 1}' + END) as desk:
        create = desk.anthropic.messages.create
        first = await create(
            model="policy",
            max_tokens=50,
            messages=QUESTION,
            stop_sequences=["."],
            extra_body={"temperature": 0.5},
        )
        forced = {"type": "tool", "name": "add"}
        second = await create(
            model="policy", max_tokens=50, messages=QUESTION, tools=CLAUDES, tool_choice=forced
        )
    assert (first.content[0].text, first.stop_reason) == ("It is 5", "stop_sequence")
    assert first.stop_sequence == "."
    assert second.content[0].input == {"a": 1}
    (_, one, _), (_, two, _) = desk.engine.requests
    assert (one.stop, one.temperature, one.max_tokens) == (["."], 0.5, 50)
    assert two.structured_outputs == StructuredOutputs(json=ADD["parameters"])


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"messages": [{"role": "system", "content": "Hi"}]}, anthropic.BadRequestError),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "It"}]},
         anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         anthropic.BadRequestError),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_as_anthropic_does(given, kind):
    async with opened() as desk:
        asked = {"model": "policy", "messages": QUESTION, "max_tokens": 9} | given
        with pytest.raises(kind) as caught:
            await desk.anthropic.messages.create(**asked)
        stranger = desk.anthropic.with_options(api_key="other")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.create(**asked)
    assert caught.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert desk.engine.requests == []
