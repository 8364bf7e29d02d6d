"""Chats of data sets: the common form of their messages, and their text by a chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Message
from lightning_rl.run.files.strict_json import loads

_SIGN = "sign3f9a"
_CALL = {"name": "look_up", "arguments": {"what": _SIGN}}
_CALLED: list[Message] = [  # Mistral's templates want ids of nine characters
    {"role": "user", "content": "Question?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "A result."},
]
_NO_CONTENT = """\
{%- set told = namespace(messages=[]) -%}
{%- for m in messages -%}
{%- set filled = dict({"content": none}, **m) if m.tool_calls is defined else m -%}
{%- set told.messages = told.messages + [filled] -%}
{%- endfor -%}
{%- set messages = told.messages %}
"""
"""A prefix for templates that recognise calls by None: transformers 5.22 drops keys with None."""


def as_chat(messages: Sequence[Any]) -> list[Any]:
    """Return messages in the form that chat templates take, whatever kind of table kept them.

    Arrow tables give each message all keys that any message has, with None for missing ones: keys
    with None are left out, at any depth, and so are ``tool_calls`` without a call. The arguments of
    a call become an object (:func:`arguments_of`), and a turn that only calls has the content
    ``""``. Items that are not messages stay as they are.
    """
    return [_message(message) if isinstance(message, Mapping) else message for message in messages]


def arguments_of(given: Any) -> Any:
    """Return the arguments of a call as an object, ``{}`` for none; invalid JSON stays text."""
    if not isinstance(given, str):
        return given or {}
    try:
        return loads(given) if given.strip() else {}
    except ValueError:
        return given


def render(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[list[Message]], options: Mapping[str, Any]
) -> list[str]:
    """Render chats by the tokenizer's template, each followed by the opening of the model's turn.

    A template that writes arguments verbatim (such as DeepSeek-V3's) gets them as text, and one
    that recognises a call only by its missing content gets None.

    Raises:
        Exception: whatever the template raises.
    """

    def written(some: Sequence[list[Message]], **template: str) -> list[str]:
        return list(
            tokenizer.apply_chat_template(
                list(some), tokenize=False, add_generation_prompt=True, **{**options, **template}
            )
        )

    def in_form(some: Sequence[list[Message]], content: str | None, as_text: bool) -> list[str]:
        formed = [_in_form(chat, content, as_text) for chat in some]
        if content is not None:
            return written(formed)
        given = {**getattr(tokenizer.apply_chat_template, "keywords", {}), **options}
        template = tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        return written(formed, chat_template=_NO_CONTENT + template)

    def shows(form: tuple[str | None, bool]) -> bool:
        try:
            return _SIGN in in_form([_CALLED], *form)[0]
        except Exception:  # it takes another form, or no calls at all
            return False

    if not any("tool_calls" in message for chat in chats for message in chat):
        return written(chats)
    forms = [(content, as_text) for as_text in (False, True) for content in ("", None)]
    return in_form(chats, *next(filter(shows, forms), forms[0]))


def _message(given: Mapping[str, Any]) -> Message:
    message: Message = _without_none(given)
    calls = message.get("tool_calls")
    if calls == []:
        del message["tool_calls"]
    elif isinstance(calls, list):
        message["tool_calls"] = [_each_function(call, arguments_of) for call in calls]
        message.setdefault("content", "")
    return message


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _in_form(chat: list[Message], content: str | None, as_text: bool) -> list[Message]:
    """Return the chat with this content where a turn only calls, and maybe arguments as text."""
    return [
        message
        | {
            "content": message["content"] or content,
            "tool_calls": [
                _each_function(call, _text_of) if as_text else call
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in chat
    ]


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _each_function(call: Any, change: Any) -> Any:
    """Return a call with changed arguments; its function may be nested or be the call itself."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _each_function(call["function"], change)}
    if isinstance(call, Mapping) and "name" in call:
        return {**call, "arguments": change(call.get("arguments"))}
    return call
