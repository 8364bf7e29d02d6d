"""Chat formats: encode a chat with given tools as tokens, and parse the model's turns."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.templates import ParsedCall, ToolParser, TurnTemplate
from lightning_rl.agents.tools import CallReader, call_message
from lightning_rl.engines.sampling import Completion, StructuredOutputs
from lightning_rl.rollout import Message, Picture, Placed
from lightning_rl.run.files.strict_json import loads
from lightning_rl.serving.messages import Said
from lightning_rl.serving.untrusted_template import RendererApart, UntrustedTemplate
from lightning_rl.vision.reader import encode

_PROMPTS_KEPT = 256
"""Number of cached encodings of whole chats: the rollouts of a group begin with the same one."""
_FORMATS_KEPT = 64
Seen = tuple[list[int], list[Placed]]
"""Token ids, and the pictures among them."""


class ChatFormat:
    """A chat template with one set of tools and options, and a parser that knows those tools.

    It is thread-safe.

    Args:
        template: renders chats.
        parser: reads calls; a copy is made for these tools.
        tools: OpenAI-style schemas.
        key: distinguishes it from other formats.
    """

    def __init__(
        self,
        template: TurnTemplate,
        parser: ToolParser,
        tools: Sequence[dict[str, Any]],
        key: str,
    ) -> None:
        self.tokenizer = template.tokenizer
        self.tools = list(tools)
        self.key = key
        self.template = template
        self._reader = CallReader(parser, self.tokenizer, self.tools) if tools else None
        self._encoded = lru_cache(_PROMPTS_KEPT)(self._encode)

    def prompt(self, chat: Sequence[Said]) -> Seen:
        """Return the tokens of a whole chat, with the opening of the model's turn.

        Raises:
            ConfigError: if the template cannot render it.
            PictureError: if the model reads no pictures, or the template has too few or too many.
        """
        token_ids, placed = self._encoded(
            f"[{','.join(item.text for item in chat)}]", _pictures_of(chat)
        )
        return list(token_ids), list(placed)

    def _encode(
        self, messages: str, pictures: tuple[Picture, ...]
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        text = self.template.render(json.loads(messages))
        token_ids, places = encode(self.tokenizer, text, pictures, special=False)
        return tuple(token_ids), tuple(map(Placed, places, pictures))

    def suffix(self, wrote: Sequence[int], turn: Message, reply: Sequence[Said]) -> Seen:
        """Return the tokens that follow the model's turn ``wrote``; pictures count from there.

        Raises:
            ConfigError: if the template cannot render them.
            PictureError: as for :meth:`prompt`.
        """
        calls, messages = turn.get("tool_calls", ()), [item.message for item in reply]
        return self.template.seen_suffix(wrote, messages, _pictures_of(reply), calls)

    # ---------------------------------------------------------------- what the model wrote

    def read(
        self,
        completion: Completion,
        stop: Sequence[str],
        before: int,
        calls_allowed: bool,
        parallel: bool,
    ) -> tuple[Message, str | None]:
        """Return a turn as a message, and the string that stopped it, which the message lacks.

        A turn that was cut off is not searched for calls, and one with an unreadable call becomes
        text, as in other servers. ``before`` is the number of calls that the chat already has.
        """
        if self._reader and calls_allowed and completion.finish_reason == "stop":
            # Call formats are made of special tokens too.
            text, ended_by = self._text(completion, stop, skip_special_tokens=False)
            content, calls = self._reader.read(text)
            if calls and not any(call.error for call in calls):
                return self._with_calls(content, calls, before, parallel), ended_by
        content, ended_by = self._text(completion, stop, skip_special_tokens=True)
        return {"role": "assistant", "content": content}, ended_by

    def read_forced(self, completion: Completion, name: str | None, before: int) -> Message:
        """Return a turn constrained by :meth:`forced` as a message; as text if it was cut off."""
        text, _ = self._text(completion, (), skip_special_tokens=True)
        try:
            found = loads(text)
        except ValueError:
            return {"role": "assistant", "content": text}
        if name is not None:
            return self._with_calls("", [ParsedCall(name, found)], before, True)
        calls = [ParsedCall(call["name"], call["parameters"]) for call in found]
        return self._with_calls("", calls, before, True)

    def forced(self, name: str | None) -> StructuredOutputs:
        """Return the schema of a turn that must call a tool: its arguments, or a list of any calls.

        It is JSON as in vLLM's server, not the format that the model learned.
        """
        functions = [tool["function"] for tool in self.tools]
        anything = {"type": "object"}
        if name is not None:
            chosen = next(function for function in functions if function["name"] == name)
            return StructuredOutputs(json=chosen.get("parameters") or anything)
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "parameters": function.get("parameters") or anything,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for function in functions
        ]
        return StructuredOutputs(json={"type": "array", "minItems": 1, "items": {"anyOf": calls}})

    def _text(
        self, completion: Completion, stop: Sequence[str], skip_special_tokens: bool
    ) -> tuple[str, str | None]:
        token_ids = self.template.ends.cut(completion.token_ids)
        return until_stop(
            str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)), stop
        )

    def _with_calls(
        self, content: str, calls: Sequence[ParsedCall], before: int, parallel: bool
    ) -> Message:
        messages = [call_message(call, number) for number, call in enumerate(calls, before)]
        if len(messages) > 1 and not (parallel and self.template.takes(messages)):
            del messages[1:]
        return {"role": "assistant", "content": content, "tool_calls": messages}


def _pictures_of(chat: Sequence[Said]) -> tuple[Picture, ...]:
    return tuple(picture for item in chat for picture in item.pictures)


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string if there is one."""
    matches = [(start, string) for string in stop if (start := text.find(string)) >= 0]
    if not matches:
        return text, None
    start, string = min(matches)
    return text[:start], string


class ChatFormats:
    """Makes chat formats, and caches recent ones.

    Args:
        tokenizer: the policy's tokenizer.
        parser: reads calls.
        options: extra variables of the template.
        apart: renders clients' templates.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: ToolParser,
        options: Mapping[str, Any],
        apart: RendererApart,
    ) -> None:
        self.tokenizer = tokenizer
        self._apart = apart
        self._parser = parser
        self._options = dict(options)
        self._made = lru_cache(_FORMATS_KEPT)(self._make)

    def of(
        self, tools: Sequence[dict[str, Any]], options: Mapping[str, Any], template: str = ""
    ) -> ChatFormat:
        """Return the format with these tools, and these options in addition to the server's.

        ``template`` is a client's, instead of the tokenizer's.

        Raises:
            ConfigError: if the tokenizer has no chat template, or the parser refuses the tools.
        """
        plain = not (tools or options or template)
        key = "" if plain else json.dumps([tools, options, template], ensure_ascii=False)
        return self._made(key)

    def _make(self, key: str) -> ChatFormat:
        tools, options, template = json.loads(key) if key else ([], {}, "")
        variables = {**self._options, **options, **({"tools": tools} if tools else {})}
        written = TurnTemplate(self.tokenizer, variables)
        if template:
            written = UntrustedTemplate(self.tokenizer, variables, template, self._apart)
        return ChatFormat(written, self._parser, tools, key)
