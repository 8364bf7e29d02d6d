"""Tools: functions that a model may call, and the calls in what it wrote."""

import asyncio
import inspect
import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lightning_rl.agents.templates import tool_reply
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message, Rollout
from lightning_rl.run.threads import in_daemon_thread


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """What a model asked for: a tool's name and its arguments, or why that cannot be read."""

    name: str = ""
    arguments: Any = None
    error: str | None = None


class ToolParser(ABC):
    """Reads a model family's tool-call format."""

    def configure(
        self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]
    ) -> None:
        """Called once, before the first turn, with the tools' OpenAI-style schemas.

        Raises:
            ConfigError: if it cannot work with this tokenizer.
        """

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        """The text beside the calls, and the calls in their order.

        ``text`` is a whole turn with its special tokens, without the end token. A call that cannot
        be read is returned with its ``error``, which the model will be told.
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
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return ParsedCall(error=f"the tool call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParsedCall(error='a tool call must be {"name": ..., "arguments": {...}}')
    return ParsedCall(call["name"], call.get("arguments", {}))


@configurable
class VLLMParser(ToolParser):
    """One of vLLM's tool-call parsers, under the name that ``vllm serve`` knows it by.

    It needs vLLM to be installed; any engine may generate. Most of vLLM's parsers take a call that
    they cannot read for plain text: the model is then not told, and the turn is its last.

    Args:
        name: such as ``llama3_json``, ``mistral``, ``qwen3_coder`` or ``pythonic``.

    Raises:
        ConfigError: if vLLM is missing.
    """

    def __init__(self, name: str) -> None:
        if find_spec("vllm") is None:
            raise ConfigError(
                f"VLLMParser({name!r}) needs vLLM: `pip install lightning_rl[cpu]` (or [cuda]); "
                "HermesParser works without"
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
        self._request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=list(schemas),
            tool_choice="auto",
        )
        try:
            make = ToolParserManager.get_tool_parser(self.name)
            self._parser = make(tokenizer, self._request.tools)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"vLLM's tool parser {self.name!r} does not work with this tokenizer: {error}"
            ) from error

    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            return text, []
        return found.content or "", [_from_vllm(call.function) for call in found.tool_calls]


def _from_vllm(function: Any) -> ParsedCall:
    try:
        return ParsedCall(function.name, json.loads(function.arguments or "{}"))
    except json.JSONDecodeError as error:
        return ParsedCall(function.name, error=f"the arguments are not valid JSON: {error}")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI-style JSON schema of a typed function with a Google-style docstring.

    Raises:
        ConfigError: if a type hint or a line of the docstring is missing.
    """
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, AttributeError) as error:
        name = getattr(function, "__qualname__", function)
        raise ConfigError(
            f"no tool can be made of {name!r}: {error}. A tool is a function with a type hint "
            "for every argument, and a docstring that says what it does and, under `Args:`, what "
            "each argument is"
        ) from error
    return schema


class Toolbox:
    """Runs the tool calls of any number of rollouts at once; each is answered by a message.

    What goes wrong is told to the model: the message's content then starts with ``Error:``, and its
    ``error`` holds the kind: ``unreadable`` (not the parser's format), ``unknown_tool``,
    ``arguments``, ``exception`` or ``timeout``.

    Args:
        functions: tools; see :func:`tool_schema`. ``async`` ones run on the event loop, plain ones
            in a thread each. A thread cannot be stopped: after a timeout it goes on unheard, so
            what may hang should be ``async``, or bound itself.
        call_timeout: seconds that one call may take.

    Raises:
        ConfigError: if a function is no tool, or two share a name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], call_timeout: float) -> None:
        try:
            from pydantic import PydanticUserError, validate_call
        except ImportError as error:
            raise ConfigError(
                "tools need pydantic to check arguments; `pip install lightning_rl[tools]`"
            ) from error
        if not call_timeout > 0:
            raise ConfigError(f"call_timeout={call_timeout} must be > 0 seconds")
        if not functions:
            raise ConfigError("tools=[] leaves nothing to call; name at least one function")
        self.schemas = [tool_schema(function) for function in functions]
        self.call_timeout = call_timeout
        self._functions: dict[str, Callable[..., Any]] = {}
        for schema, function in zip(self.schemas, functions, strict=True):
            name = schema["function"]["name"]
            if name in self._functions:
                raise ConfigError(f"two tools share the name {name!r}; rename one")
            try:
                self._functions[name] = validate_call(function)
            except PydanticUserError as error:
                raise ConfigError(
                    f"arguments of tool {name!r} cannot be checked: {error}"
                ) from error

    async def answer(self, calls: Sequence[Message]) -> list[Message]:
        """Run the calls of one turn side by side; their results in the calls' order."""
        return list(await asyncio.gather(*(self._answer(call) for call in calls)))

    async def _answer(self, call: Message) -> Message:
        from pydantic import ValidationError

        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if "error" in call:
            return _error(call, "unreadable", call["error"])
        if name not in self._functions:
            known = ", ".join(self._functions)
            return _error(call, "unknown_tool", f"there is no tool {name!r}; there are: {known}")
        if not isinstance(arguments, dict):
            return _error(call, "arguments", "the arguments must be a JSON object")
        try:
            async with asyncio.timeout(self.call_timeout) as limit:
                result = await _run(self._functions[name], arguments)
            return tool_reply(call, _as_text(result))
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return _error(call, "arguments", "; ".join(wrong))
        except Exception as error:  # a tool may raise anything; the model is told
            if isinstance(error, TimeoutError) and limit.expired():
                return _error(call, "timeout", f"{name} took longer than {self.call_timeout:g} s")
            return _error(call, "exception", f"{type(error).__name__}: {error}")


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Tool calls per rollout, and the share of them with each kind of error; {} without calls."""
    replies = [
        message
        for rollout in rollouts
        if isinstance(rollout.completion, list)
        for message in rollout.completion
        if message["role"] == "tool"
    ]
    if not replies:
        return {}
    kinds = Counter(message["error"] for message in replies if "error" in message)
    return {
        "tool/calls_mean": len(replies) / len(rollouts),
        "tool/error_share": kinds.total() / len(replies),
    } | {f"tool/error_{kind}": count / len(replies) for kind, count in kinds.items()}


def _error(call: Message, kind: str, text: str) -> Message:
    return tool_reply(call, f"Error: {text}") | {"error": kind}


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


async def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await in_daemon_thread(function, arguments)
