"""Messages in the format of Anthropic's API."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_rl.rollout import Message
from lightning_rl.serving.api_format import ApiFormat, pieces, typed_event
from lightning_rl.serving.ask import Answer, Ask, Terms, usage_of
from lightning_rl.serving.chats import ChatReader, RequestChat
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.fields import Fields, wrong_kind, wrong_value
from lightning_rl.serving.messages import content_of, joined, read_message, text_of
from lightning_rl.serving.settings import asked_sampling

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(ApiFormat):
    """Serves ``/v1/messages``."""

    def read(self, body: Any, terms: Terms) -> Ask:
        fields = Fields(body)
        model = fields.need("model", str)
        role = terms.role_of(model)
        tools = _tools(fields)
        chat = _conversation(fields, terms.chats)
        form = terms.form_of(tools, {})
        must_call, may_call, parallel = _tool_choice(fields, tools)
        off = {"type": "disabled"}
        fields.refuse("thinking", "whether a model thinks is its chat template's to say", off)
        held = form.forced(None if must_call == "*" else must_call) if must_call else None
        fields.need("max_tokens", int)
        sampling = asked_sampling(
            fields, terms, "max_tokens", "stop_sequences", structured_outputs=held
        )
        stream = fields.get("stream", bool) or False
        return Ask(
            model, role, sampling, 1, chat, form, [], may_call, must_call, parallel, stream=stream
        )

    def write(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Message:
        (answer,) = answers
        return _head(ask, number) | {
            "content": _blocks(answer),
            "stop_reason": _reason(answer),
            "stop_sequence": answer.ended_by,
            "usage": _usage(answer),
        }

    def stream(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Iterator[bytes]:
        (answer,) = answers
        begun = _head(ask, number) | {"usage": _usage(answer) | {"output_tokens": 0}}
        yield typed_event("message_start", message=begun)
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                empty, kind, text = block | {"text": ""}, "text", block["text"]
            else:
                empty, kind = block | {"input": {}}, "partial_json"
                text = json.dumps(block["input"], ensure_ascii=False)
            yield typed_event("content_block_start", index=index, content_block=empty)
            for piece in pieces(text):
                delta = {"type": _DELTAS[kind], kind: piece}
                yield typed_event("content_block_delta", index=index, delta=delta)
            yield typed_event("content_block_stop", index=index)
        ended = {"stop_reason": _reason(answer), "stop_sequence": answer.ended_by}
        yield typed_event("message_delta", delta=ended, usage=_usage(answer))
        yield typed_event("message_stop")

    def error(self, error: RequestError) -> Message:
        body = {"type": _ERRORS.get(error.status, "api_error"), "message": error.message}
        return {"type": "error", "error": body, "request_id": None}


_DELTAS = {"text": "text_delta", "partial_json": "input_json_delta"}


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools in the form of OpenAI's API, which chat templates use too."""
    tools = []
    for number, given in enumerate(fields.get("tools", list) or []):
        tool = Fields(given, f"tools.{number}.")
        if (kind := tool.get("type", str)) not in (None, "custom"):
            raise wrong_value(f"tools.{number}.type", kind, "'custom'")
        function = {
            "name": tool.need("name", str),
            "description": tool.get("description", str) or "",
            "parameters": tool.need("input_schema", dict),
        }
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> tuple[str, bool, bool]:
    """Return the tool that must be called (any: ``*``), and whether one or several may be."""
    choice = Fields(fields.get("tool_choice", dict) or {"type": "auto"}, "tool_choice.")
    kind = choice.need("type", str)
    if kind not in ("auto", "any", "tool", "none"):
        raise wrong_value("tool_choice.type", kind, "'auto', 'any', 'tool', and 'none'")
    parallel = not choice.get("disable_parallel_tool_use", bool)
    if kind in ("auto", "none"):
        return "", kind == "auto", parallel
    name = "*" if kind == "any" else choice.need("name", str)
    if not tools or (kind == "tool" and all(t["function"]["name"] != name for t in tools)):
        raise RequestError(
            f"tool_choice: tool '{name:.80}' is not among the tools", param="tool_choice"
        )
    return name, True, parallel


# ---------------------------------------------------------------- messages


def _conversation(fields: Fields, reader: ChatReader) -> RequestChat:
    """Return the chat as OpenAI's messages, with a separate message for each tool result."""
    system = text_of(fields.body.get("system"), "system")
    before: list[Any] = [{"role": "system", "content": system}] if system else []

    def messages(place: int, given: Any) -> list[Message]:
        number = place - len(before)
        said = [given] if number < 0 else _messages(Fields(given, f"messages.{number}."))
        return [read_message(place, message) for message in said]

    chat = reader.read([*before, *fields.need("messages", list)], messages)
    if chat.said[-1].message["role"] == "assistant":
        raise RequestError(
            "This model does not support assistant message prefill. The conversation must end "
            "with a user message.",
            param="messages",
        )
    return chat


def _messages(message: Fields) -> list[Message]:
    role = message.need("role", str)
    if role == "user":
        return _from_user(message)
    if role == "assistant":
        return [_from_model(message)]
    raise wrong_value(message.path + "role", role, "'user', 'assistant'")


def _content(message: Fields) -> list[Fields]:
    """Return the blocks of a message; a string is one block."""
    content = message.body.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_kind(message.path + "content", content, list)
    where = message.path + "content"
    return [Fields(block, f"{where}.{number}.") for number, block in enumerate(content)]


def _from_user(message: Fields) -> list[Message]:
    parts: list[Any] = []
    results: list[Message] = []
    for block in _content(message):
        kind = block.need("type", str)
        if kind == "text":
            parts.append({"type": "text", "text": block.need("text", str)})
        elif kind == "image":
            parts.append(block.body)
        elif kind == "tool_result":
            given = content_of(block.body.get("content"), block.path + "content")
            called = block.need("tool_use_id", str)
            results.append({"role": "tool", "tool_call_id": called, "content": given})
        else:
            raise wrong_value(block.path + "type", kind, "'text', 'image', 'tool_result'")
    if parts or not results:
        return [*results, {"role": "user", "content": joined(parts)}]
    return results


def _from_model(message: Fields) -> Message:
    texts, calls = [], []
    for block in _content(message):
        kind = block.need("type", str)
        if kind == "text":
            texts.append(block.need("text", str))
        elif kind == "tool_use":
            function = {"name": block.need("name", str), "arguments": block.need("input", dict)}
            calls.append({"id": block.need("id", str), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            raise wrong_value(block.path + "type", kind, "'text', 'tool_use'")
    turn: Message = {"role": "assistant", "content": "".join(texts)}
    return turn | ({"tool_calls": calls} if calls else {})


# ---------------------------------------------------------------- answers


def _head(ask: Ask, number: str) -> Message:
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(answer: Answer) -> list[Message]:
    texts = [{"type": "text", "text": answer.text}] if answer.text else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in answer.message.get("tool_calls", ())
    ]
    return [*texts, *calls]


def _reason(answer: Answer) -> str:
    return "stop_sequence" if answer.ended_by is not None else _REASONS[answer.finish_reason]


def _usage(answer: Answer) -> dict[str, int]:
    read, wrote = usage_of([answer])
    return {"input_tokens": read, "output_tokens": wrote}
