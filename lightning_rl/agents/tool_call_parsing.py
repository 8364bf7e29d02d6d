"""Reads the tool calls in a model's turn, outside the event loop and within a time limit."""

import warnings
from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.templates import ParsedCall, ToolParser
from lightning_rl.run.loop.threads import CallingThread

READ_S = 5.0
"""Time limit, in seconds, for parsing one turn."""


class CallReader:
    """Reads turns with its own copy of a parser, one at a time, each within a time limit.

    A turn that takes longer counts as text without calls, with a single warning. Any thread may
    call it; a parser is Python code, which lets other threads run meanwhile.

    Args:
        parser: reads calls; it is copied, as it may hold state.
        tokenizer: the policy's tokenizer.
        schemas: the tools' OpenAI-style schemas.

    Raises:
        ConfigError: if the parser cannot work with this tokenizer.
    """

    def __init__(
        self,
        parser: ToolParser,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
    ) -> None:
        self._given, self._configured = parser, (tokenizer, schemas)
        self._one_at_a_time = Lock()
        self._thread = CallingThread("lightning_rl tool calls")
        self._warned = False
        self._parser = self._new_parser()

    def close(self) -> None:
        """End the thread; a later call starts another."""
        self._thread.close()

    def read(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the parser's result for a turn; call it in any thread but the event loop's."""
        with self._one_at_a_time:  # so that a turn's time begins with its own reading
            parser = self._parser
            call = self._thread.submit(lambda: parser.parse(text))
            try:
                read: tuple[str, list[ParsedCall]] = call.result(READ_S)
            except TimeoutError:
                if call.done():  # just now, or the error is the parser's own
                    return call.result()
                self._thread.abandon(call)
                self._parser = self._new_parser()  # the other is still being used
                self._warn(len(text))
                return text, []
            return read

    def _new_parser(self) -> ToolParser:
        parser = copy(self._given)
        parser.configure(*self._configured)
        return parser

    def _warn(self, length: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._given).__name__} took more than {READ_S:g} s to look for tool "
                f"calls in a turn of {length} characters; such turns count as text without calls. "
                "Lower sampling.max_tokens, or choose another parser",
                stacklevel=2,
            )
