"""ToolAgent: the model calls Python functions, reads what they return, and then answers."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, append_given, generate_turn, room
from lightning_rl.agents.templates import TurnTemplate, tool_reply
from lightning_rl.agents.tools import HermesParser, ParsedCall, Toolbox, ToolParser
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Message, Rollout, RolloutStatus


@configurable
class ToolAgent(Agent):
    """Turns with tool calls are answered by the tools' results; a turn without one is the answer.

    ``rollout.completion`` becomes the list of messages: the model's, with its ``tool_calls``, and
    the tools'. The model's tokens are kept as it wrote them, and only they are trained on.

    ``finish_reason`` is ``stop`` (an answer), ``length`` (``max_tokens``, which counts the results
    too, or the engine's length), ``max_turns`` or ``max_seconds``.

    Args:
        tools: functions with type hints and a docstring; see :func:`lightning_rl.agents.tools`.
        parser: reads the model family's way to write calls.
        max_turns: turns of the model; calls in its last one are not run.
        call_timeout: seconds that one call may take.
        max_seconds: wall time for one rollout; None: no limit.
        allow_rewrites: accept a chat template that shows earlier turns otherwise than the model
            wrote them.

    Raises:
        ConfigError: for values out of range, or functions that are no tools.
    """

    def __init__(
        self,
        tools: list[Callable[..., Any]],
        parser: ToolParser | None = None,
        max_turns: int = 8,
        call_timeout: float = 10.0,
        max_seconds: float | None = None,
        allow_rewrites: bool = False,
    ) -> None:
        require_at_least(1, max_turns=max_turns)
        if max_seconds is not None and not max_seconds > 0:
            raise ConfigError(f"max_seconds={max_seconds} must be > 0 (None: no limit)")
        self.toolbox = Toolbox(tools, call_timeout)
        self.parser = parser or HermesParser()
        self.max_turns = max_turns
        self.max_seconds = max_seconds
        self.allow_rewrites = allow_rewrites
        self.chat_options = {"tools": self.toolbox.schemas}
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template: TurnTemplate | None = None
        self._one_call = False  # the chat template has no place for two in a turn

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = TurnTemplate(tokenizer, self.chat_options)
        call = _as_message(self._sample_call(), 0)
        template.check([tool_reply(call, "A result.")], [call], self.allow_rewrites)
        self.parser.configure(tokenizer, self.toolbox.schemas)
        self._check_prompt(template)
        self._check_parser(template, call)
        self._one_call = not _renders_two(template, self._sample_call())
        self._tokenizer, self._template = tokenizer, template

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        if isinstance(rollout.prompt.prompt, str):
            raise ConfigError(
                f"ToolAgent needs chats, but prompt {rollout.prompt.id!r} is plain text, in which "
                "tools have no place; write it as messages"
            )
        messages = [] if isinstance(rollout.completion, str) else rollout.completion
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            messages.pop()  # of a turn that was interrupted; its tokens are still there
        rollout.completion = messages
        limit = asyncio.timeout(self.max_seconds)
        try:
            async with limit:
                reason = await self._converse(rollout, messages, engine, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            reason = "max_seconds"
        rollout.finish_reason = reason
        aborted = reason == "abort" or not rollout.token_ids
        rollout.status = RolloutStatus.ABORTED if aborted else RolloutStatus.COMPLETED
        return rollout

    async def _converse(
        self, rollout: Rollout, messages: list[Message], engine: Engine, sampling: Sampling
    ) -> str:
        """Take turns until something ends the rollout; tells what.

        The rollout holds all there is to know, so that one that was interrupted goes on from it.
        """
        if self._template is None:
            raise ConfigError("ToolAgent has no tokenizer yet; call configure(tokenizer) first")
        while True:
            if not (messages and messages[-1].get("tool_calls")):
                left = room(rollout, engine, sampling)
                if left < 1:
                    return "length"
                begun = len(_last_turn(rollout))
                completion = await generate_turn(rollout, engine, sampling, left, begun)
                if completion.finish_reason == "abort":
                    return "abort"
                whole = completion.finish_reason == "stop"
                messages.append(self._read(_last_turn(rollout), messages, parse=whole))
                if not whole:
                    return completion.finish_reason
            calls = messages[-1].get("tool_calls")
            if not calls:
                return "stop"
            if sum(message["role"] == "assistant" for message in messages) == self.max_turns:
                return "max_turns"
            results = await self.toolbox.answer(calls)
            suffix = self._template.suffix(_last_turn(rollout), results, calls)
            if len(suffix) >= room(rollout, engine, sampling):
                return "length"
            append_given(rollout, suffix)
            messages += results

    def _read(self, wrote: list[int], messages: list[Message], parse: bool) -> Message:
        """A turn of the model as a message. One that was cut off is not searched for calls."""
        assert self._tokenizer is not None
        ended = wrote[-1:] == [self._tokenizer.eos_token_id]
        # Call formats are made of special tokens too.
        text = str(self._tokenizer.decode(wrote[:-1] if ended else wrote))
        content, calls = self.parser.parse(text) if parse else (text, [])
        if self._one_call and len(calls) > 1:
            calls = [ParsedCall(calls[0].name, error="only one tool may be called per turn")]
        if not calls:
            content = str(self._tokenizer.decode(wrote, skip_special_tokens=True))
            return {"role": "assistant", "content": content}
        before = sum(len(message.get("tool_calls", ())) for message in messages)
        numbered = [_as_message(call, number) for number, call in enumerate(calls, before)]
        return {"role": "assistant", "content": content, "tool_calls": numbered}

    # ---------------------------------------------------------------- checks

    def _sample_call(self) -> ParsedCall:
        function = self.toolbox.schemas[0]["function"]
        properties = function["parameters"]["properties"].items()
        return ParsedCall(
            function["name"], {name: _sample(schema.get("type")) for name, schema in properties}
        )

    def _check_prompt(self, template: TurnTemplate) -> None:
        opened = template.render([{"role": "user", "content": "Question?"}])
        for schema in self.toolbox.schemas:
            if schema["function"]["name"] not in opened:
                raise ConfigError(
                    f"the chat template does not show the tool {schema['function']['name']!r} to "
                    "the model; use one that renders `tools`"
                )

    def _check_parser(self, template: TurnTemplate, call: Message) -> None:
        """The template shows the model how calls are written: the parser must read that."""
        text = template.call_text(call)
        _, calls = self.parser.parse(text)
        if [(c.name, c.arguments) for c in calls] != [tuple(call["function"].values())]:
            raise ConfigError(
                f"{type(self.parser).__name__} does not read tool calls as this chat template "
                f"writes them, {text!r}; choose the parser of the model's family, such as "
                "VLLMParser('llama3_json')"
            )


def _sample(kind: Any) -> Any:
    """An argument of a JSON schema's type."""
    samples = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return samples.get(kind, "text") if isinstance(kind, str) else "text"


def _as_message(call: ParsedCall, number: int) -> Message:
    """As in a message's ``tool_calls``; ids of nine letters and digits, as Mistral wants them."""
    function = {"name": call.name, "arguments": {} if call.error else call.arguments}
    message: Message = {"id": f"call{number:05d}", "type": "function", "function": function}
    return message | ({"error": call.error} if call.error else {})


def _renders_two(template: TurnTemplate, call: ParsedCall) -> bool:
    calls = [_as_message(call, number) for number in (0, 1)]
    try:
        template.suffix([], [tool_reply(call, "A result.") for call in calls], calls)
    except ConfigError:
        return False
    return True


def _last_turn(rollout: Rollout) -> list[int]:
    """What the model wrote since it was last given anything."""
    mask = reversed(rollout.loss_mask)
    length = sum(1 for _ in takewhile(bool, mask))
    return rollout.token_ids[len(rollout.token_ids) - length :]
