"""Chat formats of model families: the text between two turns, and the syntax of tool calls."""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import NO_TEMPLATE, row_options
from lightning_rl.data.end_tokens import MARK, QUESTION, end_tokens_of
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message, Picture, Placed, of_whole_characters
from lightning_rl.run.files.strict_json import loads
from lightning_rl.vision.reader import encode

THOUGHT = "<think>\nFirst.\n</think>\n\nSecond."
PADDED = "  Padded.\n"


class TurnTemplate:
    """Continues a chat at the level of tokens, in the format of the tokenizer's chat template.

    Only what *follows* a turn of the model is rendered: the end of that turn, if the model did not
    write it itself, the new messages, and the opening of the model's next turn. The tokens that the
    model wrote are never changed.

    Args:
        tokenizer: has a chat template that closes a turn with one of its end tokens
            (:class:`~lightning_rl.data.end_tokens.EndTokens`).
        chat_options: extra variables of the template, such as ``tools``.

    Raises:
        ConfigError: if the tokenizer has no chat template or no end token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(f"an agent that continues chats needs a chat template: {NO_TEMPLATE}")
        self.tokenizer = tokenizer
        self.chat_options = dict(chat_options or {})
        self.ends = end_tokens_of(tokenizer)
        self._of_rows: dict[str, TurnTemplate] = {}
        self._end_texts = list(map(str, tokenizer.convert_ids_to_tokens([*self.ends.token_ids])))

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a chat, with the opening of the model's next turn.

        Raises:
            ConfigError: if the template cannot render such messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                **(self.chat_options | options),
            )
        except Exception as error:  # a template may raise anything
            roles = [
                f"{message['role']} with tool calls" if "tool_calls" in message else message["role"]
                for message in messages
            ]
            raise ConfigError(
                f"the chat template cannot render [{', '.join(roles)}]: {error}; use a model whose "
                "template knows such messages"
            ) from error
        return str(text)

    def of_row(
        self, columns: Mapping[str, Any], check: Callable[["TurnTemplate"], None]
    ) -> "TurnTemplate":
        """Return the template with the variables that a row gives it, checked once for each value.

        Raises:
            ConfigError: what ``check`` raises.
        """
        options = row_options(columns)
        key = json.dumps(options, sort_keys=True)
        if key not in self._of_rows:
            one = TurnTemplate(self.tokenizer, self.chat_options | options) if options else self
            check(one)
            self._of_rows[key] = one
        return self._of_rows[key]

    def suffix(
        self, wrote: Sequence[int], reply: Sequence[Message], calls: Sequence[Message] = ()
    ) -> list[int]:
        """Return the token ids that follow the turn ``wrote``: the replies and the next opening.

        Args:
            wrote: the tokens of the model's turn, with or without its end token.
            reply: the messages that answer it.
            calls: the calls that tool results answer, as in a message's ``tool_calls``.

        Raises:
            ConfigError: if the template cannot render such replies.
        """
        return self.seen_suffix(wrote, reply, [], calls)[0]

    def seen_suffix(
        self,
        wrote: Sequence[int],
        reply: Sequence[Message],
        pictures: Sequence[Picture],
        calls: Sequence[Message] = (),
    ) -> tuple[list[int], list[Placed]]:
        """Return :meth:`suffix` of replies with pictures, and the pictures' places in it.

        ``reply`` has a part ``{"type": "image"}`` for each picture
        (:func:`~lightning_rl.vision.messages.pictures_of`).

        Raises:
            ConfigError: if the template cannot render such replies.
            PictureError: if the model reads no pictures, or the template has no place for them.
        """
        text = self._after_turn(reply, calls)
        token_ids, places = encode(self.tokenizer, text, pictures, special=False)
        known = int(self._is_closed(wrote, token_ids[0]))
        placed = zip(places, pictures, strict=True)
        return token_ids[known:], [Placed(start - known, picture) for start, picture in placed]

    def takes(self, calls: Sequence[Message]) -> bool:
        """Tell whether the template can render these calls in one turn; some render only one."""
        try:
            self.suffix([], [tool_reply(call, "A result.") for call in calls], calls)
        except ConfigError:
            return False
        return True

    def call_text(self, call: Message) -> str:
        """Return a turn that is one tool call as the template writes it, without the end token."""
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        # A reply follows, because some templates treat a last message differently.
        text = self.render([QUESTION, turn, tool_reply(call, "A result.")])
        opened = self.render([QUESTION])
        return self._before_end(text[_shared(opened, text) :])

    def check(
        self, reply: Sequence[Message], calls: Sequence[Message] = (), allow_rewrites: bool = False
    ) -> None:
        """Refuse a template that rewrites the history that the model really saw.

        Conversations are rendered step by step: each must extend the previous one unchanged.

        Args:
            reply: messages such as those that will answer a turn.
            calls: the calls that tool results answer.
            allow_rewrites: check only that a turn can be continued at all.

        Raises:
            ConfigError: if the template rewrites the history, or no turn can follow.
        """
        text = self._checked_end(reply, calls)
        if allow_rewrites:
            return
        differences = [
            *self._rewritten_turns(reply, calls),
            *self._changed_later(reply, calls, text),
        ]
        if differences:
            raise ConfigError(
                "this chat template rewrites earlier turns, so the model would be trained on "
                "conversations that it never sees when served:\n"
                + "\n".join(f"- {difference}" for difference in differences)
                + "\nChange tokenizer.chat_template so that it leaves earlier turns unchanged "
                "and save the tokenizer, or set allow_rewrites: true to train on the "
                "tokens as they were generated"
            )

    # ---------------------------------------------------------------- inside

    def _after_turn(self, reply: Sequence[Message], calls: Sequence[Message]) -> str:
        """Return the text from the end token of the model's turn on."""
        turn: Message = {"role": "assistant", "content": "" if calls else MARK}
        if calls:  # as a server would show it, since templates look back at calls
            marked = {"name": calls[-1]["function"]["name"], "arguments": {"x": MARK}}
            turn["tool_calls"] = [*calls[:-1], {**calls[-1], "function": marked}]
        text = self.render([QUESTION, turn, *reply])
        place = text.rfind(MARK)
        if place < 0:
            what = "tool calls" if calls else "turns"
            raise ConfigError(
                f"the chat template does not render the model's {what}; use a model whose "
                "template does"
            )
        after = text[place + 1 :]
        gap = self._before_end(after)
        if gap == after or (gap and not calls):
            raise ConfigError(
                f"the chat template closes the model's turns with {gap[:40]!r}, but its end tokens "
                f"are {', '.join(map(repr, self._end_texts))}, so the engine would not stop there; "
                "set tokenizer.eos_token to the token that ends a turn, and save the tokenizer"
            )
        return after[len(gap) :]

    def _before_end(self, text: str) -> str:
        """Return a text up to its first end token; all of it if it has none."""
        return min((text.partition(end)[0] for end in self._end_texts), key=len)

    def _is_closed(self, wrote: Sequence[int], end: int) -> bool:
        """Tell whether the model's turn is already closed, so that ``end`` must not be added.

        Where the template closes turns by another token, only that token counts as closing.
        """
        return self.ends.ended(wrote) and end in (wrote[-1], self.ends.turn)

    def _checked_end(self, reply: Sequence[Message], calls: Sequence[Message]) -> str:
        text = self._after_turn(reply, calls)
        first = self.tokenizer(text, add_special_tokens=False)["input_ids"][0]
        if first not in self.ends.token_ids:
            cut = next(end for end in self._end_texts if text.startswith(end))
            raise ConfigError(
                f"the tokenizer splits its own end token {cut!r}; add it as a special token "
                "and save the tokenizer"
            )
        return text

    def _rewritten_turns(self, reply: Sequence[Message], calls: Sequence[Message]) -> list[str]:
        """Find turns that the template renders differently once a reply follows."""
        opened = self.render([QUESTION])
        inside = opened.rstrip().endswith("<think>")  # the opening begins the thought already
        result = []
        for content in ("Plain.", THOUGHT.removeprefix("<think>\n") if inside else THOUGHT, PADDED):
            text = self.render([QUESTION, _turn(content, calls), *reply])
            if not text.startswith(opened):
                return [f"what comes before a turn, {_difference(opened, text)}"]
            became = self._before_end(text[len(opened) :])
            if not (became.startswith(content) if calls else became == content):
                result.append(f"a turn written as {content!r} becomes {became!r:.120}")
        return result

    def _changed_later(
        self, reply: Sequence[Message], calls: Sequence[Message], suffix: str
    ) -> list[str]:
        """Find what a second exchange changes in the first one, or in the reply's own text."""
        turn = _turn("Plain.", calls)
        once = self.render([QUESTION, turn, *reply])
        try:
            twice = self.render([QUESTION, turn, *reply, turn, *reply])
        except ConfigError as error:
            return [str(error)]
        if not twice.startswith(once):
            return [f"when the chat goes on, {_difference(once, twice)}"]
        if not twice.endswith(suffix):
            return [
                f"what follows a turn, {suffix!r}, becomes {twice[-len(suffix) :]!r} after the next"
            ]
        return []


def tool_reply(call: Message, content: str | list[Any]) -> Message:
    """Return the message that answers a tool call."""
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": of_whole_characters(content),
    }


def _turn(content: str, calls: Sequence[Message]) -> Message:
    turn: Message = {"role": "assistant", "content": content}
    return turn | ({"tool_calls": list(calls)} if calls else {})


def _shared(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


def _difference(before: str, after: str) -> str:
    place = _shared(before, after)
    return f"{before[place : place + 60]!r} becomes {after[place : place + 60]!r}"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A model's tool call: the tool's name and its arguments, or why it cannot be read."""

    name: str = ""
    arguments: Any = None
    error: str | None = None


class ToolParser(ABC):
    """Reads a model family's tool-call format."""

    def configure(
        self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]
    ) -> None:
        """Receive the tools' OpenAI-style schemas, once, before the first turn.

        Raises:
            ConfigError: if the parser cannot work with this tokenizer.
        """

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the text outside the calls, and the calls in order.

        ``text`` is a whole turn with its special tokens, without the end token. A call that cannot
        be read is returned with its ``error``, which the model will see.
        """


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5 and Qwen3."""

    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        calls = [_read_call(m[1], closed=bool(m[2])) for m in self._CALL.finditer(text)]
        return self._CALL.sub("", text).strip() if calls else text, calls


def _read_call(text: str, closed: bool) -> ParsedCall:
    if not closed:
        return ParsedCall(error="the tool call is not closed by </tool_call>")
    try:
        call = loads(text)
    except ValueError as error:
        return ParsedCall(error=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParsedCall(error='a tool call must be {"name": ..., "arguments": {...}}')
    return ParsedCall(call["name"], call.get("arguments", {}))


@configurable
class VLLMParser(ToolParser):
    """One of vLLM's tool-call parsers, by its name in ``vllm serve``.

    It needs vLLM to be installed; any engine may generate. Most of vLLM's parsers treat a call that
    they cannot read as plain text: the model is not told, and the turn ends the rollout.

    Args:
        name: for example ``llama3_json``, ``mistral``, ``qwen3_coder`` or ``pythonic``.

    Raises:
        ConfigError: if vLLM is missing.
    """

    def __init__(self, name: str) -> None:
        if find_spec("vllm") is None:
            raise ConfigError(
                f"VLLMParser({name!r}) needs vLLM, which is not installed; see Install in the "
                "README, or use HermesParser"
            )
        self.name = name
        self._parser: Any = None
        self._request: Any = None

    def configure(
        self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]
    ) -> None:
        # Written against vLLM 0.32. All that is used of its parsers is in this class.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if self.name not in known:
            raise ConfigError(f"vLLM has no tool parser {self.name!r}; it has {', '.join(known)}")
        # What a model gets wrong is no error of the run, and would be a stack trace each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._request = ChatCompletionRequest(
                model="policy",
                messages=[{"role": "user", "content": ""}],
                tools=list(schemas),
                tool_choice="auto",
            )
        except ValueError as error:  # pydantic's
            raise ConfigError(
                f"vLLM does not accept the schemas of these tools: {error}"
            ) from error
        try:
            make = ToolParserManager.get_tool_parser(self.name)
            self._parser = make(tokenizer, self._request.tools)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"vLLM's tool parser {self.name!r} does not work with this tokenizer: {error}"
            ) from error
        if (engine := getattr(self._parser, "_parser_engine", None)) is not None:
            # For who streams it reads all arguments anew at each piece, in quadratic time.
            engine._stream_arg_deltas = False
            _require_closed_names(engine._engine)

    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        return found.content or "", [_from_vllm(call.function) for call in found.tool_calls]


def _require_closed_names(machine: Any) -> None:
    """Let a tool's name end only where its format says, so that ``<function=NAME`` is no call.

    vLLM also ends it where the call or the turn ends, and then runs the call without arguments.
    """
    from vllm.parser.engine.events import EventType
    from vllm.parser.engine.parser_engine_config import ParserState

    naming, moves, finish = ParserState.TOOL_NAME, machine.config.transitions, machine.finish

    def finish_marked() -> list[Any]:
        return [*(machine.feed("<", []) if machine.state is naming else ()), *finish()]

    machine.finish = finish_marked
    # In formats without a mark after the name (GLM's), its call's end is one.
    if any(state is naming and not move.events for (state, _), move in moves.items()):
        kept = {
            key: move
            for key, move in moves.items()
            if key[0] is not naming or EventType.TOOL_CALL_END not in move.events
        }
        machine.config = replace(machine.config, transitions=kept)


def _from_vllm(function: Any) -> ParsedCall:
    if re.search(r"[\s<>]", function.name):
        return ParsedCall(error=f"the name of the tool is not closed: {function.name[:80]!r}")
    try:
        return ParsedCall(function.name, loads(function.arguments or "{}"))
    except ValueError as error:
        return ParsedCall(function.name, error=f"the arguments are not valid JSON: {error}")
