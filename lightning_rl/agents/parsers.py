"""Tool-call parsers: from the text of a turn to the calls in it."""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.arguments import configurable
from lightning_rl.errors import ConfigError


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
