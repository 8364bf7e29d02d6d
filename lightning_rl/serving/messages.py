"""Chat messages as clients send them, in the one form that templates take and answers match."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rollout import Message
from lightning_rl.run.strict_json import loads
from lightning_rl.serving.fields import Fields, wrong_kind, wrong_value

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a conversation.

    Args:
        message: as chat templates take it: text content, arguments of calls as objects.
        text: all of it, as JSON.
        key: what makes it the same message for whoever compares. Of a model's message these are
            the words and the calls, whatever a client made of spaces around them or of ids.
    """

    message: Message
    text: str
    key: str


def said(message: Message) -> Said:
    """Of a message in the form of templates."""
    text = json.dumps(message, ensure_ascii=False)
    if message["role"] != "assistant":
        return Said(message, text, text)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    key = ["assistant", message["content"].strip(), calls]
    return Said(message, text, json.dumps(key, ensure_ascii=False, sort_keys=True))


def with_name(message: Message, before: Sequence[Said]) -> Message:
    """The same message; a tool's result with the name of the tool that was called ``before``."""
    if message["role"] != "tool" or "name" in message:
        return message
    calls = (c for item in reversed(before) for c in reversed(item.message.get("tool_calls", ())))
    called = (c["function"]["name"] for c in calls if c["id"] == message["tool_call_id"])
    return message | {"name": next(called, "")}


def read_message(number: int, given: Any) -> Message:
    """A message of a chat completion's request, in the form of templates.

    What has no place in a template (``refusal``, ``audio``, ``reasoning_content``, a call's
    ``index``) is left out.

    Raises:
        RequestError: if it is none.
    """
    fields = Fields(given, f"messages[{number}].")
    role = fields.need("role", str)
    if role not in ROLES:
        raise wrong_value(fields.path + "role", role, ", ".join(map(repr, ROLES)))
    content = text_of(fields.body.get("content"), fields.path + "content")
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", str)
    if role == "assistant":
        given = fields.get("tool_calls", list) or []
        where = fields.path + "tool_calls"
        if given:
            calls = [_call(Fields(c, f"{where}[{n}].")) for n, c in enumerate(given)]
            message["tool_calls"] = calls
    elif fields.body.get("content") is None:
        raise wrong_kind(fields.path + "content", None, str)
    if name := fields.get("name", str):
        message["name"] = name
    return message


def _call(fields: Fields) -> Message:
    function = Fields(fields.need("function", dict), fields.path + "function.")
    arguments = function.body.get("arguments") or "{}"
    return {
        "id": fields.need("id", str),
        "type": "function",
        "function": {"name": function.need("name", str), "arguments": _object(arguments)},
    }


def _object(arguments: Any) -> Any:
    """Arguments as templates take them; anything but JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return loads(arguments)
    except ValueError:
        return arguments


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or blocks of text.

    Raises:
        RequestError: for other blocks, such as images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_kind(where, content, str)
    parts = []
    for number, block in enumerate(content):
        fields = Fields(block, f"{where}[{number}].")
        kind = fields.need("type", str)
        if kind not in ("text", "refusal"):
            raise wrong_value(fields.path + "type", kind, "'text'")
        parts.append(fields.need(kind, str))
    return "".join(parts)
