"""Responses in the format of OpenAI's API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lightning_rl.data.chats import CLOSE, OPEN, arguments_of
from lightning_rl.rollout import Message
from lightning_rl.serving.api_format import OpenAIFormat, pieces, typed_event
from lightning_rl.serving.ask import DEFAULT_MODEL, Answer, Ask, Terms, usage_of
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.fields import Fields, wrong_kind, wrong_value
from lightning_rl.serving.kept_responses import KeptResponses
from lightning_rl.serving.messages import content_of, read_message, thought_and_answer
from lightning_rl.serving.openai_chat import calls_of, template_variables, tool_choice
from lightning_rl.serving.settings import answer_form, asked_sampling


@dataclass(slots=True, kw_only=True)
class _ResponseAsk(Ask):
    """A request for a response.

    ``said`` is its chat without the instructions, which do not hold for later responses. ``told``
    has the fields of the request that its response repeats.
    """

    said: list[Message]
    kept: KeptResponses
    told: dict[str, Any] = field(default_factory=dict)


class ResponsesFormat(OpenAIFormat):
    """Serves ``/v1/responses``."""

    def read(self, body: Any, terms: Terms) -> Ask:
        fields = Fields(body)
        model = fields.get("model", str) or DEFAULT_MODEL
        role = terms.role_of(model)
        _refuse(fields)
        said = _chat(fields, terms.responses)
        instructions = fields.get("instructions", str)
        before = [{"role": "system", "content": instructions}] if instructions else []
        chat = terms.chats.read([*before, *said], lambda _, message: [message])
        tools = _tools(fields)
        template = fields.get("chat_template", str) or ""
        form = terms.form_of(tools, template_variables(fields), template)
        must_call, may_call = tool_choice(fields, tools)
        text = Fields(fields.get("text", dict) or {}, "text.")
        held = answer_form(text, "format", within="")
        if must_call:
            held = form.forced(None if must_call == "*" else must_call)
        return _ResponseAsk(
            model=model,
            role=role,
            sampling=asked_sampling(fields, terms, "max_output_tokens", structured_outputs=held),
            chat=chat,
            form=form,
            may_call=may_call,
            must_call=must_call,
            parallel=fields.get("parallel_tool_calls", bool) is not False,
            stream=fields.get("stream", bool) or False,
            said=said,
            kept=terms.responses,
            told={name: fields.body.get(name) for name in _TOLD}
            | {"tools": fields.body.get("tools") or []}
            | {"tool_choice": fields.body.get("tool_choice") or "auto"},
        )

    def write(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Message:
        assert isinstance(ask, _ResponseAsk)
        (answer,) = answers
        items = _items(answer, number)
        name = f"resp_{number}"
        ask.kept.keep(name, [*ask.said, answer.message], items)
        cut = answer.finish_reason == "length"
        return {
            "id": name,
            "object": "response",
            "created_at": now,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": ask.model,
            "output": items,
            "parallel_tool_calls": ask.parallel,
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "truncation": "disabled",
            "usage": _usage(answer),
            **ask.told,
        }

    def stream(self, ask: Ask, answers: Sequence[Answer], number: str, now: int) -> Iterator[bytes]:
        response, numbers = self.write(ask, answers, number, now), count()
        for kind, fields in _events(response):
            yield typed_event(kind, sequence_number=next(numbers), **fields)

    def error(self, error: RequestError) -> Message:
        told = super().error(error)
        if error.param == "messages":  # as the other formats call it
            told["error"]["param"] = "input"
        return told


_TOLD = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "text")


def _refuse(fields: Fields) -> None:
    """Refuse fields that would change an answer and are not supported."""
    reason = "send the messages as input"
    fields.refuse("conversation", f"{reason}, or previous_response_id")
    fields.refuse("prompt", reason)
    fields.refuse("background", "a request waits for its answer", False)
    fields.refuse("truncation", "a prompt that is too long is refused", "disabled")
    reason = "/v1/chat/completions gives the logprobs of the sampled tokens"
    fields.refuse("top_logprobs", reason, 0)
    if "message.output_text.logprobs" in fields.texts("include"):
        raise wrong_value("include", "message.output_text.logprobs", f"the others; {reason}")


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools in the form of chat completions, which chat templates use too."""
    tools = []
    for number, given in enumerate(fields.get("tools", list) or []):
        tool = Fields(given, f"tools[{number}].")
        if (kind := tool.need("type", str)) != "function":
            raise wrong_value(f"{tool.path}type", kind, "'function'")
        function = {
            "name": tool.need("name", str),
            "description": tool.get("description", str),
            "parameters": tool.get("parameters", dict),
        }
        given = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": given})
    return tools


# ---------------------------------------------------------------- the chat


def _chat(fields: Fields, kept: KeptResponses) -> list[Message]:
    """Return the chat of a request, with that of its previous response, without instructions."""
    previous = fields.get("previous_response_id", str)
    before = [] if previous is None else kept.chat(previous)
    given = fields.body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if given is not None and not isinstance(given, list):
        raise wrong_kind("input", given, list)
    chat = [*before, *_messages(given or [], kept)]
    if not chat:
        raise RequestError(
            "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    return chat


def _messages(given: Sequence[Any], kept: KeptResponses) -> list[Message]:
    """Return the messages of items: a thought, a text and calls in a row are one turn."""
    messages: list[Message] = []
    thinking = False  # whether the last item was a thought, which a text continues
    for number, value in enumerate(given):
        item = Fields(value, f"input[{number}].")
        kind = item.get("type", str) or "message"
        if kind == "item_reference":
            item = Fields(kept.item(item.need("id", str)), item.path)
            kind = item.body["type"]
        if kind == "reasoning":
            begun = _thinking(item)
            thinking = bool(begun)
            messages += begun
            continue
        if kind == "message":
            message = read_message(number, item.body, "input")
            if thinking and message["role"] == "assistant":
                message["content"] = messages.pop()["content"] + message["content"]
            messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            content = content_of(item.body.get("output"), f"{item.path}output")
            called = item.need("call_id", str)
            messages.append({"role": "tool", "tool_call_id": called, "content": content})
        else:
            raise wrong_value(f"{item.path}type", kind, _KINDS)
        thinking = False
    return messages


_KINDS = "'message', 'reasoning', 'function_call', 'function_call_output', 'item_reference'"


def _thinking(item: Fields) -> list[Message]:
    """Return a reasoning item as the turn that it begins; nothing if it has no text."""
    parts = enumerate(item.get("content", list) or [])
    texts = [Fields(p, f"{item.path}content[{n}].").need("text", str) for n, p in parts]
    thought = "".join(texts)
    content = f"{OPEN}\n{thought}\n{CLOSE}\n\n"
    return [{"role": "assistant", "content": content}] if thought else []


def _call(item: Fields) -> Message:
    arguments = arguments_of(item.body.get("arguments"))
    function = {"name": item.need("name", str), "arguments": arguments}
    return {"id": item.need("call_id", str), "type": "function", "function": function}


# ---------------------------------------------------------------- answers


def _items(answer: Answer, number: str) -> list[Message]:
    """Return an answer as items: its thought, its text, and its calls."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    thought, text = thought_and_answer(answer.text)
    calls = calls_of(answer)
    items: list[Message] = []
    if thought:
        part: Message = {"type": "reasoning_text", "text": thought}
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [part]})
    if text or not (thought or calls):
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        )
    for place, call in enumerate(calls):
        name = {"type": "function_call", "id": f"fc_{number}-{place}", "call_id": call["id"]}
        items.append(name | call["function"])
    return [item | {"status": status} for item in items]


def _usage(answer: Answer) -> Message:
    read, wrote = usage_of([answer])
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": wrote,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + wrote,
    }


def _events(response: Message) -> Iterator[tuple[str, Message]]:
    """Yield the events of a response, each with its type."""
    begun: Message = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield "response.created", {"response": response | begun}
    yield "response.in_progress", {"response": response | begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        empty: Message = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = item | empty | {"status": "in_progress"}
        yield "response.output_item.added", {**at, "item": added}
        yield from _parts(item, {**at, "item_id": item["id"]})
        yield "response.output_item.done", {**at, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _parts(item: Message, at: Message) -> Iterator[tuple[str, Message]]:
    """Yield the events of what is in an item: its arguments, or its text."""
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        for piece in pieces(item["arguments"]):
            yield f"{kind}.delta", {**at, "delta": piece}
        yield f"{kind}.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        return
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    kind = f"response.{part['type']}"
    logprobs: Message = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield f"{kind}.delta", {**at, "delta": piece, **logprobs}
    yield f"{kind}.done", {**at, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**at, "part": part}
