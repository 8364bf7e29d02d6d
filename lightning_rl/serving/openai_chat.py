"""Chat completions in the format of OpenAI's API."""

import json
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Message
from lightning_rl.serving.api_format import (
    ChoicesFormat,
    pieces,
    read_count,
    read_wanted,
    token_ids_of,
)
from lightning_rl.serving.ask import DEFAULT_MODEL, Answer, Ask, Terms
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.fields import Fields, wrong_value
from lightning_rl.serving.settings import answer_form, asked_sampling


class ChatCompletionsFormat(ChoicesFormat):
    """Serves ``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def read(self, body: Any, terms: Terms) -> Ask:
        fields = Fields(body)
        model = fields.get("model", str) or DEFAULT_MODEL
        role = terms.role_of(model)
        chat = terms.chats.read(fields.need("messages", list))
        tools = _tools(fields)
        form = terms.form_of(
            tools, template_variables(fields), fields.get("chat_template", str) or ""
        )
        must_call, may_call = tool_choice(fields, tools, "function")
        _refuse(fields)
        limit = "max_tokens" if fields.body.get(_LIMIT) is None else _LIMIT
        held = answer_form(fields)
        if must_call:
            held = form.forced(None if must_call == "*" else must_call)
        sampling = asked_sampling(fields, terms, limit, structured_outputs=held)
        wanted = read_wanted(fields) | {"logprobs": fields.get("logprobs", bool) or False}
        parallel = fields.get("parallel_tool_calls", bool) is not False
        count = read_count(fields, terms.limits)
        return Ask(
            model, role, sampling, count, chat, form, [], may_call, must_call, parallel, **wanted
        )

    def choice(self, index: int, ask: Ask, answer: Answer) -> Message:
        message: Message = {"role": "assistant", "content": answer.text, "refusal": None}
        if calls := calls_of(answer):
            message |= {"content": answer.text or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(ask, answer) if ask.logprobs else None,
            "finish_reason": _reason(ask, answer),
            **(token_ids_of(answer) if ask.token_ids else {}),
        }

    def chunks(self, index: int, ask: Ask, answer: Answer) -> Iterator[Message]:
        def chunk(delta: Message, logprobs: Any = None, reason: str | None = None) -> Message:
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

        calls = calls_of(answer)
        yield chunk(
            {"role": "assistant", "content": None if calls and not answer.text else ""},
            _logprobs(ask, answer) if ask.logprobs else None,
        )
        for piece in pieces(answer.text):
            yield chunk({"content": piece})
        for number, call in enumerate(calls):
            begun = {**call["function"], "arguments": ""}
            yield chunk({"tool_calls": [{"index": number, **call, "function": begun}]})
            for piece in pieces(call["function"]["arguments"]):
                told = {"index": number, "function": {"arguments": piece}}
                yield chunk({"tool_calls": [told]})
        ids = token_ids_of(answer) if ask.token_ids else {}
        yield chunk({}, reason=_reason(ask, answer)) | ids


_LIMIT = "max_completion_tokens"


def _refuse(fields: Fields) -> None:
    """Refuse fields that would change an answer and are not supported."""
    reason = "the engine tells the logprob of the sampled token only; logprobs: true gives it"
    fields.refuse("top_logprobs", reason, 0)
    fields.refuse("logit_bias", "its tokens could not be scored", {})
    fields.refuse("functions", "use tools", [])
    fields.refuse("function_call", "use tool_choice")
    fields.refuse("modalities", "answers are text", ["text"])
    fields.refuse("audio", "answers are text")


_OURS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
_OURS |= {"messages", "conversations"}
"""Names that are not variables of a template, but arguments of its renderer."""


def template_variables(fields: Fields) -> dict[str, Any]:
    """Read extra variables of the chat template."""
    given = Fields(fields.get("chat_template_kwargs", dict) or {}, "chat_template_kwargs.")
    for name in _OURS & given.body.keys():
        given.refuse(name, "it is set by the server; a template is sent as chat_template")
    return {name: value for name, value in given.body.items() if name not in _OURS}


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.get("tools", list) or []
    for number, tool in enumerate(tools):
        given = Fields(tool, f"tools[{number}].")
        if (kind := given.need("type", str)) != "function":
            raise wrong_value(f"tools[{number}].type", kind, "'function'")
        function = Fields(given.need("function", dict), f"tools[{number}].function.")
        function.need("name", str)
        function.get("description", str)
        function.get("parameters", dict)
    return tools


def tool_choice(
    fields: Fields, tools: Sequence[dict[str, Any]], within: str = ""
) -> tuple[str, bool]:
    """Return the tool that must be called (any: ``*``), and whether one may be called.

    ``within`` is the field of the choice that has the tool's name; empty: the choice itself has it.
    """
    choice = fields.body.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return "", choice != "none"
    if not tools:
        raise RequestError(
            "'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice"
        )
    if choice == "required":
        return "*", True
    if isinstance(choice, str):
        raise wrong_value("tool_choice", choice, "'none', 'auto', and 'required'")
    chosen = Fields(choice, "tool_choice.")
    if within:
        chosen = Fields(chosen.need(within, dict), f"tool_choice.{within}.")
    name = chosen.need("name", str)
    if all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(
            f"Tool choice '{name:.80}' not found in 'tools' parameter.", param="tool_choice"
        )
    return name, True


def calls_of(answer: Answer) -> list[Message]:
    """Return the answer's calls in the API's form, with arguments as a JSON string."""
    return [
        {
            **call,
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in answer.message.get("tool_calls", ())
    ]


def _reason(ask: Ask, answer: Answer) -> str:
    """Return the API's finish reason: ``stop`` after a call of a tool that the client named."""
    named = ask.must_call not in ("", "*")
    return "stop" if named and answer.finish_reason == "tool_calls" else answer.finish_reason


def _logprobs(ask: Ask, answer: Answer) -> Message:
    assert ask.form is not None
    content = []
    completion = answer.completion
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = str(ask.form.tokenizer.decode([token]))
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**entry, "top_logprobs": []})
    return {"content": content, "refusal": None}
