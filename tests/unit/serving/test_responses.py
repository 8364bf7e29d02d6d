"""Test the Responses API of AgentServer with OpenAI's client, and what is recorded of it."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.engines.sampling import Sampling, StructuredOutputs
from tests.support.served_chats import ADD, END, QUESTION, TOKENIZER, TOOLS, encoded, opened

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADDS = [{"type": "function", **ADD, "strict": False}]
THANKS = {"role": "user", "content": "Thanks."}
OPENING = "<|im_start|>assistant\n"


def render(messages, **options):
    return TurnTemplate(TOKENIZER, options).render(messages)


def then(text):
    """Return how the template goes on after a turn that the user answers."""
    return f"\n<|im_start|>user\n{text}{END}\n{OPENING}"


RESULT = then("<tool_response>\n5\n</tool_response>")


def respond(desk, **options):
    return desk.openai.responses.create(model="policy", **options)


def result_of(call, output="5"):
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


# ---------------------------------------------------------------- what is answered


async def test_a_text_is_answered_and_recorded():
    async with opened("It is 5." + END) as desk:
        answer = await respond(desk, input="What is 2 + 3?", instructions="Be brief.")
    (message,) = answer.output
    assert (answer.status, answer.output_text, answer.error) == ("completed", "It is 5.", None)
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.tool_choice, answer.tools) == ("Be brief.", "auto", [])
    asked = render([{"role": "system", "content": "Be brief."}, *QUESTION])
    assert desk.asked == [asked]
    read, wrote = len(encoded(asked)), len(encoded("It is 5." + END))
    usage = answer.usage
    told = (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    assert told == (read, wrote, read + wrote)
    (row,) = desk.rollout.rows[1:]
    assert (row.prompt_ids, row.token_ids) == (encoded(asked), encoded("It is 5." + END))
    assert row.loss_mask == [True] * wrote
    assert row.logprobs == [-0.5 - i for i in range(wrote)]


def as_objects(items):
    return items


def as_dumps(items):
    return [item.model_dump() for item in items]


def as_little(items):
    """Return the items as a program writes them by hand, with other arguments' text."""
    little = []
    for item in items:
        if item.type == "message":
            little.append({"role": "assistant", "content": item.content[0].text})
        elif item.type == "reasoning":
            content = [{"type": "reasoning_text", "text": item.content[0].text}]
            little.append({"type": "reasoning", "summary": [], "content": content})
        else:
            arguments = json.dumps(json.loads(item.arguments), separators=(",", ":"))
            named = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            little.append({"type": "function_call", **named})
    return little


def as_references(items):
    return [{"type": "item_reference", "id": item.id} for item in items]


@pytest.mark.parametrize("thought", ["", "<think>\nTwo, three.\n</think>\n\n"])
@pytest.mark.parametrize("text", ["", "Let me add. "])
@pytest.mark.parametrize("sent_back", [as_objects, as_dumps, as_little, as_references])
async def test_items_sent_back_go_on_from_the_tokens_that_were_written(sent_back, text, thought):
    wrote = [thought + text + CALL + END, thought + "It is 5." + END, "Bye." + END]
    async with opened(*wrote) as desk:
        said = list(QUESTION)
        first = await respond(desk, input=said, tools=ADDS)
        said += [*sent_back(first.output), result_of(first.output[-1])]
        second = await respond(desk, input=said, tools=ADDS)
        said += [*sent_back(second.output), THANKS]
        await respond(desk, input=said, tools=ADDS)
    kinds = ["reasoning"] * bool(thought) + ["message"] * bool(text) + ["function_call"]
    assert [item.type for item in first.output] == kinds
    call = first.output[-1]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    assert (first.output_text, second.output_text) == (text.strip(), "It is 5.")
    if thought:
        assert first.output[0].content[0].text == "Two, three."
    prompt = render(QUESTION, tools=TOOLS)
    assert desk.asked == [
        prompt,
        prompt + wrote[0] + RESULT,
        prompt + wrote[0] + RESULT + wrote[1] + then("Thanks."),
    ]
    assert desk.written == wrote
    assert len(desk.rollout.rows[1:]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_by_its_id(stream):
    wrote = ["<think>\nHm.\n</think>\n\n" + CALL + END, "It is 5." + END, "It is 6." + END]
    async with opened(*wrote) as desk:

        async def ask(**options):
            told = await respond(desk, tools=ADDS, stream=stream, **options)
            return [event async for event in told][-1].response if stream else told

        first = await ask(input="What is 2 + 3?", instructions="Be brief.")
        result, named = result_of(first.output[-1]), {"previous_response_id": first.id}
        second = await ask(input=[result], instructions="Be brief.", **named)
        assert (second.output_text, second.previous_response_id) == ("It is 5.", first.id)
        third = await ask(input=[result], **named)  # instructions do not go on
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    asked = render(system, tools=TOOLS)
    assert desk.asked[:2] == [asked, asked + wrote[0] + RESULT]
    assert desk.asked[2].startswith(render(QUESTION, tools=TOOLS)[: -len(OPENING)])
    assert [call.row for call in desk.rollout.calls] == [1, 1, 2]
    assert len({first.id, second.id, third.id}) == 3


async def test_a_response_that_was_cut_off_is_incomplete_and_gone_on_from():
    async with opened("It is 5." + END, "<think>\nTwo and" + END, "Bye." + END) as desk:
        first = await respond(desk, input="What is 2 + 3?", max_output_tokens=5)
        cut = {"previous_response_id": first.id, "input": "Go on.", "max_output_tokens": 9}
        second = await respond(desk, **cut)
        await respond(desk, previous_response_id=second.id, input="And?")
        said = [*QUESTION, *first.output, {"role": "user", "content": "Go on."}, *second.output]
        desk.engine.turns.append("Bye." + END)
        await respond(desk, input=[*said, {"role": "user", "content": "And?"}])
    assert (first.status, first.output_text) == ("incomplete", "It is")
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.output[0].status == "incomplete"
    assert [(item.type, item.content[0].text) for item in second.output] == [("reasoning", "T")]
    goes_on = render(QUESTION) + "It is" + END + then("Go on.") + "<think>\nT" + END + then("And?")
    assert desk.asked[2:] == [goes_on, goes_on]


async def test_an_empty_answer_is_a_message():
    async with opened(END, "Bye." + END) as desk:
        first = await respond(desk, input="What is 2 + 3?")
        await respond(desk, input=[*QUESTION, *first.output, THANKS])
    assert [item.content[0].text for item in first.output] == [""]
    assert desk.asked[1] == render(QUESTION) + END + then("Thanks.")


async def test_calls_in_a_row_are_one_turn():
    two = CALL + "\n" + CALL.replace("2", "7")
    async with opened(two + END, "5 and 10." + END, CALL + END) as desk:
        first = await respond(desk, input=QUESTION, tools=ADDS)
        results = [result_of(call) for call in first.output]
        await respond(desk, input=[*QUESTION, *first.output, *results], tools=ADDS)
        one = await respond(desk, input=QUESTION, tools=ADDS, parallel_tool_calls=False)
    assert [call.call_id for call in first.output] == ["call00000", "call00001"]
    assert desk.asked[1].startswith(render(QUESTION, tools=TOOLS) + two + END)
    assert len(one.output) == 1


async def test_a_chat_of_completions_is_continued_as_items():
    """Both APIs of OpenAI are one session: an answer of either keeps its tokens in the other."""
    async with opened("It is 5." + END, "Bye." + END) as desk:
        first = (await desk.chat()).choices[0].message
        said = {"role": "assistant", "content": [{"type": "output_text", "text": first.content}]}
        thanks = {"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]}
        await respond(desk, input=[*QUESTION, said, thanks])
    assert desk.asked[1] == render(QUESTION) + "It is 5." + END + then("Thanks.")
    assert [call.row for call in desk.rollout.calls] == [1, 1]


# ---------------------------------------------------------------- settings


async def test_forms_and_settings_reach_the_engine():
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    forced = {"type": "function", "name": "add"}
    any_of = [{"name": "add", "parameters": {"a": 1}}]
    run = Sampling(max_tokens=500, temperature=0.7)
    said = ["{}" + END, '{"a": 1}' + END, json.dumps(any_of) + END, CALL + END]
    async with opened(*said, sampling=run) as desk:
        first = await respond(
            desk, input="Go", text=text, temperature=0.3, max_output_tokens=9, top_p=0.9
        )
        named = await respond(desk, input="Go", tools=ADDS, tool_choice=forced)
        some = await respond(desk, input="Go", tools=ADDS, tool_choice="required")
        none = await respond(desk, input="Go", tools=ADDS, tool_choice="none")
    one, two, three, four = [sampling for _, sampling, _ in desk.engine.requests]
    assert (one.temperature, one.top_p, one.max_tokens) == (0.3, 0.9, 9)
    assert one.structured_outputs == StructuredOutputs(json=schema)
    assert (first.temperature, first.top_p, first.max_output_tokens) == (0.3, 0.9, 9)
    assert two.structured_outputs == StructuredOutputs(json=ADD["parameters"])
    assert three.structured_outputs.json["type"] == "array"
    assert four == run
    for answer in (named, some):
        assert json.loads(answer.output[0].arguments) == {"a": 1}
    assert none.output_text == CALL
    choices = [call.tool_choice for call in desk.rollout.calls]
    assert choices == [None, "add", "required", "none"]
    assert desk.rollout.extra["tools"] == TOOLS


async def test_variables_of_the_template_reach_it():
    async with opened("Hi" + END) as desk:
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        await respond(desk, input="What is 2 + 3?", extra_body=options)
    assert desk.asked == [render(QUESTION, enable_thinking=False)]
    assert desk.asked != [render(QUESTION)]


# ---------------------------------------------------------------- streams


async def test_a_stream_says_what_the_whole_response_does():
    text = "Words and more words, äöü, until it is longer than a chunk."
    wrote = f"<think>\nHm.\n</think>\n\n{text} {CALL}{END}"
    asked = {"model": "policy", "input": "Go", "tools": ADDS}
    async with opened(wrote) as desk, desk.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    part = [
        "response.output_item.added", "response.content_part.added", "delta", "done",
        "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    kinds = [event.type for event in events]
    once = [kind for n, kind in enumerate(kinds) if kind != kinds[n - 1]]
    inner = {
        "response.reasoning_text": part,
        "response.output_text": part,
        "response.function_call_arguments": [part[0], "delta", "done", part[-1]],
    }
    expected = [
        f"{name}.{kind}" if kind in ("delta", "done") else kind
        for name, parts in inner.items()
        for kind in parts
    ]
    begun = ["response.created", "response.in_progress"]
    assert once == [*begun, *expected, "response.completed"]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert len(deltas) == 2
    assert "".join(deltas) == text
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == text
    assert json.loads(final.output[2].arguments) == {"a": 2, "b": 3}
    assert final.usage.output_tokens == len(encoded(wrote))


@pytest.mark.parametrize("cut", [False, True])
async def test_responses_and_events_are_of_the_apis_form(cut):
    body = {"model": "policy", "input": "Go", "tools": ADDS, "text": {"format": {"type": "text"}}}
    body |= {"max_output_tokens": 20 if cut else 200}
    wrote = "<think>\nHm.\n</think>\n\nLet me add. " + CALL + END
    async with opened(wrote, wrote) as desk:
        whole = await desk.post("/responses", **body)
        events = (await desk.post("/responses", **body, stream=True)).text.split("\n\n")
    told = TypeAdapter(Response).validate_python(whole.json())
    assert told.status == ("incomplete" if cut else "completed")
    assert events.pop() == ""
    for event in events:
        kind, data = event.split("\n")
        read = TypeAdapter(ResponseStreamEvent).validate_json(data.removeprefix("data: "))
        assert kind == f"event: {read.type}"
    assert read.type == ("response.incomplete" if cut else "response.completed")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("request_", "status", "param", "code"),
    [
        ({"input": []}, 400, "input", "missing_required_parameter"),
        ({"input": 5}, 400, "input", "invalid_type"),
        ({"input": [{"role": "me", "content": ""}]}, 400, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         400, "input[0].content[0].type", "invalid_value"),
        ({"input": [*QUESTION, {"type": "web_search_call", "id": "w"}]},
         400, "input[1].type", "invalid_value"),
        ({"input": [{"type": "function_call_output", "output": "5"}]},
         400, "input[0].call_id", "missing_required_parameter"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "input", None),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id",
         "previous_response_not_found"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "invalid_value"),
        ({"tools": ADDS, "tool_choice": {"type": "function", "name": "sub"}}, 400,
         "tool_choice", None),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type", "invalid_value"),
        ({"background": True}, 400, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, 400, "conversation", "unsupported_parameter"),
        ({"truncation": "auto"}, 400, "truncation", "unsupported_parameter"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, 400, "include", "invalid_value"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", None),
        ({"model": "gpt-6"}, 404, "model", "model_not_found"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_as_openai_does(request_, status, param, code):
    async with opened() as desk:
        with pytest.raises(openai.APIStatusError) as caught:
            await desk.openai.responses.create(**{"model": "policy", "input": "Hi"} | request_)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert code is None or caught.value.code == code
    assert caught.value.type == "invalid_request_error"
    assert desk.engine.requests == []


async def test_a_response_of_another_session_is_unknown():
    async with opened("Hi" + END, "It is 5." + END) as desk, opened() as other:
        first = await respond(desk, input="Hi")
        with pytest.raises(openai.BadRequestError, match=f"'{first.id}' not found") as caught:
            await respond(other, input="Hi", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_a_prompt_that_leaves_no_room_is_an_input_that_is_too_long():
    async with opened() as desk:
        desk.engine.max_length = 9
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await respond(desk, input="What is 2 + 3?")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
