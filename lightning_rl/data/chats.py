"""Chats of data sets: the common form of their messages, and their text by a chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Message
from lightning_rl.run.files.strict_json import loads

OPEN, CLOSE = "<think>", "</think>"
"""What a thought begins and ends with."""
SET_BY_US = (
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "return_dict",
)
"""Arguments of ``apply_chat_template`` that no user can set as a variable of the template."""
NO_TEMPLATE = (
    "the tokenizer has no chat template; use the instruct model, or put a chat_template.jinja into "
    "the model's folder (docs/prompts.md has one that works, with tools)"
)
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


def is_chat(value: Any) -> bool:
    """Return True for a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def arguments_of(given: Any) -> Any:
    """Return the arguments of a call as an object, ``{}`` for none; invalid JSON stays text."""
    if not isinstance(given, str):
        return given or {}
    try:
        return loads(given) if given.strip() else {}
    except ValueError:
        return given


def begins_turn(chat: Sequence[Message]) -> bool:
    """Return True if a chat ends in a turn of the model, which the model is to continue."""
    return chat[-1]["role"] == "assistant"


def render(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Message],
    options: Mapping[str, Any],
    closed: bool = False,
) -> str:
    """Render a chat by the tokenizer's template, up to where the model goes on writing.

    That is the opening of its turn, or the end of a turn that the chat has begun for it
    (transformers' ``continue_final_message``; a thought that is not over follows the opening as it
    is, since templates would close it). A ``closed`` chat is rendered as it is. A template that
    writes arguments verbatim (such as DeepSeek-V3's) gets them as text, and one that recognises a
    call only by its missing content gets None.

    Raises:
        ValueError: if the chat ends in tool calls, which no turn can follow.
        Exception: whatever the template raises.
    """

    def written(some: list[Message], opened: bool, **template: str) -> str:
        kwargs = {"add_generation_prompt": opened, **options, **template}
        return str(tokenizer.apply_chat_template(some, tokenize=False, **kwargs))

    def in_form(
        some: list[Message], content: str | None, as_text: bool, opened: bool, **more: Any
    ) -> str:
        formed = _in_form(some, content, as_text)
        if content is not None:
            return written(formed, opened, **more)
        given = {**getattr(tokenizer.apply_chat_template, "keywords", {}), **options}
        template = tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        return written(formed, opened, chat_template=_NO_CONTENT + template, **more)

    def shows(form: tuple[str | None, bool]) -> bool:
        try:
            return _SIGN in in_form(_CALLED, *form, True)
        except Exception:  # it takes another form, or no calls at all
            return False

    def in_its_form(some: list[Message], opened: bool, **more: Any) -> str:
        if not any("tool_calls" in message for message in some):
            return written(some, opened, **more)
        forms = [(content, as_text) for as_text in (False, True) for content in ("", None)]
        return in_form(some, *next(filter(shows, forms), forms[0]), opened, **more)

    if closed or not begins_turn(chat):
        return in_its_form(chat, not closed)
    if "tool_calls" in chat[-1]:
        raise ValueError("it ends in tool calls; let their results follow")
    begun = chat[-1]["content"]
    if begun and not (isinstance(begun, str) and OPEN in begun and CLOSE not in begun):
        return in_its_form(chat, False, continue_final_message=True)
    opening = in_its_form(chat[:-1], True)
    if opening.rstrip().endswith(OPEN):  # the template has opened the thought already
        begun = begun.removeprefix(OPEN).removeprefix("\n")
    return opening + (begun or "")


def begun_in(text: str, chat: Sequence[Message]) -> str:
    """Return the turn that a chat begins for the model, as its rendered ``text`` ends with it."""
    if not begins_turn(chat):
        return ""
    content = chat[-1]["content"]
    if not isinstance(content, str):  # content parts, of which the last text is continued
        content = next((part["text"] for part in reversed(content) if "text" in part), "")
    forms = (content, content.rstrip(), content.strip())  # templates trim
    return next((form for form in forms if text.endswith(form)), content)


def row_options(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row tells the chat template: its ``tools`` and ``chat_template_kwargs``.

    Both may be JSON text, or have come through an Arrow table, which fills up with None. An empty
    list of tools is None, as a template takes it, and says that an agent is to offer none.

    Raises:
        ValueError: says which column is not of that form.
    """
    options: dict[str, Any] = _parsed(columns, "chat_template_kwargs", dict, "an object") or {}
    if reserved := [name for name in options if name in SET_BY_US]:
        raise ValueError(
            f"chat_template_kwargs.{reserved[0]} is set by the library; leave it out of the row"
        )
    tools = _parsed(columns, "tools", list, "a list of JSON schemas")
    if tools is None:
        return options
    named = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in named):
        raise ValueError(_column_fault("tools", "a list of JSON schemas", tools))
    return options | {"tools": tools or None}


def tool_names(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools, from their OpenAI-style schemas."""
    return [schema.get("function", schema)["name"] for schema in schemas]


def _parsed(columns: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    given = _without_none(columns.get(name))
    if isinstance(given, str):
        given = arguments_of(given)
    if given is None or given == {}:
        return None
    if not isinstance(given, kind):
        raise ValueError(_column_fault(name, what, given))
    return given


def _column_fault(name: str, what: str, given: Any) -> str:
    return (
        f"column {name!r} is read as {what} for the chat template, but is {given!r:.80}; correct "
        f"it, or rename it (columns: {{other_name: {name}}})"
    )


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
