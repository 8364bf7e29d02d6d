"""Converts clients' chat messages to one form, which templates use and answers are matched by."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_rl.data.chats import CLOSE, OPEN, arguments_of
from lightning_rl.rollout import Message, Picture
from lightning_rl.serving.fields import Fields, wrong_kind, wrong_value
from lightning_rl.vision.limits import PictureAccess, PictureLimits
from lightning_rl.vision.messages import IMAGE_KINDS, TEXT_KINDS, is_picture, pictures_of

ROLES = ("system", "developer", "user", "assistant", "tool")
_SEEING = ("user", "tool")
"""Roles whose messages may have pictures."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a conversation.

    Args:
        message: in the form of chat templates: text content, or parts if there are pictures;
            arguments of calls as objects.
        text: the whole message as JSON; a picture's part holds its digest.
        key: equal for messages that count as the same. For a model's message it has only the
            thought, the answer and the calls, without surrounding spaces and ids, which clients may
            change.
    """

    message: Message
    text: str
    key: str
    pictures: tuple[Picture, ...] = ()


def seen(message: Message, limits: PictureLimits, access: PictureAccess) -> Said:
    """Make a Said of a message in the form of templates, loading its pictures.

    Raises:
        PictureError: if a picture cannot be loaded.
    """
    [bare], pictures = pictures_of([message], limits, access=access)
    if pictures:
        left = iter(pictures)
        bare["content"] = [
            part | {"digest": next(left).digest} if is_picture(part) else part
            for part in bare["content"]
        ]
    return replace(said(bare), pictures=tuple(pictures))


def said(message: Message) -> Said:
    """Make a Said of a message in the form of templates, without pictures."""
    text = json.dumps(message, ensure_ascii=False)
    if message["role"] != "assistant":
        return Said(message, text, text)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    key = ["assistant", *thought_and_answer(message["content"].strip()), calls]
    return Said(message, text, json.dumps(key, ensure_ascii=False, sort_keys=True))


def thought_and_answer(text: str) -> tuple[str, str]:
    """Split a model's text into its thought, which is empty if there is none, and the rest.

    A thought ends with ``</think>``. It begins with ``<think>``, or with the text itself, since a
    template may have opened it.
    """
    thought, closed, answer = text.rpartition(CLOSE)
    if not closed and not text.startswith(OPEN):
        return "", text
    thought, answer = (thought, answer) if closed else (text, "")
    return thought.strip().removeprefix(OPEN).strip(), answer.strip()


def with_name(message: Message, before: Sequence[Said]) -> Message:
    """Return the message; a tool's result gets the name of the tool that was called ``before``."""
    if message["role"] != "tool" or "name" in message:
        return message
    calls = (c for item in reversed(before) for c in reversed(item.message.get("tool_calls", ())))
    called = (c["function"]["name"] for c in calls if c["id"] == message["tool_call_id"])
    return message | {"name": next(called, "")}


def read_message(number: int, given: Any, within: str = "messages") -> Message:
    """Return a message of a request, in the field ``within``, in the form of templates.

    Fields that templates cannot render (``refusal``, ``audio``, ``reasoning_content``, a call's
    ``index``) are left out.

    Raises:
        RequestError: if it is not a valid message.
    """
    fields = Fields(given, f"{within}[{number}].")
    role = fields.need("role", str)
    if role not in ROLES:
        raise wrong_value(fields.path + "role", role, ", ".join(map(repr, ROLES)))
    read = content_of if role in _SEEING else text_of
    content = read(fields.body.get("content"), fields.path + "content")
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
    arguments = arguments_of(function.body.get("arguments"))
    return {
        "id": fields.need("id", str),
        "type": "function",
        "function": {"name": function.need("name", str), "arguments": arguments},
    }


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, which is a string or blocks of text.

    Raises:
        RequestError: for other blocks, such as images.
    """
    read = content_of(content, where, pictures=False)
    assert isinstance(read, str)
    return read


def content_of(content: Any, where: str, pictures: bool = True) -> str | list[Any]:
    """Return a message's content: its text, or parts if there are pictures.

    Args:
        content: a string, or blocks of text and pictures.
        where: its place in the request, for error messages.
        pictures: whether pictures are allowed.

    Raises:
        RequestError: for other blocks, such as audio.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_kind(where, content, str)
    parts: list[Any] = []
    for number, block in enumerate(content):
        fields = Fields(block, f"{where}[{number}].")
        kind = fields.need("type", str)
        if pictures and kind in IMAGE_KINDS:
            parts.append(block)
        elif kind in (*TEXT_KINDS, "refusal"):
            text = fields.need("refusal" if kind == "refusal" else "text", str)
            parts.append({"type": "text", "text": text})
        else:
            allowed = ("text", *IMAGE_KINDS) if pictures else ("text",)
            raise wrong_value(fields.path + "type", kind, ", ".join(map(repr, allowed)))
    return joined(parts)


def joined(parts: list[Any]) -> str | list[Any]:
    """Join parts into one text if all are text; else return them unchanged."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)
