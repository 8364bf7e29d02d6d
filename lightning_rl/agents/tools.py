"""Tools: functions that a model may call; and the agent that runs them."""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from lightning_rl.agents.base import (
    Agent,
    append_given,
    end,
    generate_turn,
    record_turns,
    require_seconds,
    room,
    within,
)
from lightning_rl.agents.reading import CallReader
from lightning_rl.agents.templates import (
    HermesParser,
    ParsedCall,
    ToolParser,
    TurnTemplate,
    tool_reply,
)
from lightning_rl.config.arguments import configurable
from lightning_rl.data.ends import ends_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.rollout import Message, Rollout
from lightning_rl.run.exits import UsesSignals, function_called_here
from lightning_rl.run.threads import CallingThreads, storable
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.messages import pictures_of
from lightning_rl.vision.results import as_content

_threads = CallingThreads("lightning_rl tools")


@configurable
class ToolAgent(Agent):
    """Turns with tool calls are answered by the tools' results; a turn without one is the answer.

    ``rollout.completion`` becomes the list of messages: the model's, with its ``tool_calls``, and
    the tools'. The model's tokens are kept as it wrote them, and only they are trained on.

    ``finish_reason`` is ``stop`` (an answer), ``length`` (``max_tokens``, which counts the results
    too, or the engine's length), ``max_turns`` or ``max_seconds``.

    Args:
        tools: functions with type hints and a docstring; see :func:`tool_schema`.
        parser: reads the model family's way to write calls.
        max_turns: turns of the model; calls in its last one are not run.
        call_timeout: seconds that one call may take.
        max_seconds: wall time for one rollout; None: no limit.
        allow_rewrites: accept a chat template that shows earlier turns differently than the model
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
        require_seconds(max_seconds)
        self.toolbox = Toolbox(tools, call_timeout)
        self.parser = parser or HermesParser()
        self.max_turns = max_turns
        self.max_seconds = max_seconds
        self.allow_rewrites = allow_rewrites
        self.chat_options = {"tools": self.toolbox.schemas}
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template: TurnTemplate | None = None
        self._reader: CallReader | None = None
        self._one_call = False  # the chat template has no place for two in a turn

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = TurnTemplate(tokenizer, self.chat_options)
        call = call_message(self._sample_call(), 0)
        template.check([tool_reply(call, "A result.")], [call], self.allow_rewrites)
        self._reader = CallReader(self.parser, tokenizer, self.toolbox.schemas)
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
        conversation = self._converse(rollout, messages, engine, sampling)
        reason = await within(self.max_seconds, conversation)
        # With calls that were read, it was the results that found no room.
        whole = bool(messages) and "tool_calls" in messages[-1]
        cut = reason == "abort" or (reason == "length" and not whole)
        record_turns(rollout, reason if cut else "stop")
        rollout.extra["tools"] = [*self.toolbox.schemas]
        for call in rollout.calls:
            call.tool_choice = "auto"
        end(rollout, reason)
        return rollout

    async def _converse(
        self, rollout: Rollout, messages: list[Message], engine: Engine, sampling: Sampling
    ) -> str:
        """Take turns until something ends the rollout; returns the reason.

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
                messages.append(await self._read(_last_turn(rollout), messages, parse=whole))
                if not whole:
                    return completion.finish_reason
            calls = messages[-1].get("tool_calls")
            if not calls:
                return "stop"
            if sum(message["role"] == "assistant" for message in messages) == self.max_turns:
                return "max_turns"
            shown = await self.toolbox.answer(calls)
            results, pictures = pictures_of(shown, self.toolbox.picture_limits)
            suffix, placed = self._template.seen_suffix(
                _last_turn(rollout), results, pictures, calls
            )
            if len(suffix) >= room(rollout, engine, sampling):
                return "length"
            append_given(rollout, suffix, placed)
            messages += results

    async def _read(self, wrote: list[int], messages: list[Message], parse: bool) -> Message:
        """A turn of the model as a message. One that was cut off is not searched for calls."""
        assert self._tokenizer is not None and self._reader is not None
        reader = self._reader
        said = ends_of(self._tokenizer).cut(wrote)
        # Call formats are made of special tokens too.
        text = str(self._tokenizer.decode(said))
        calls: list[ParsedCall] = []
        if parse:
            content, calls = await _threads.call(lambda: reader.read(text))
        if self._one_call and len(calls) > 1:
            calls = [ParsedCall(calls[0].name, error="only one tool may be called per turn")]
        if not calls:
            content = str(self._tokenizer.decode(said, skip_special_tokens=True))
            return {"role": "assistant", "content": content}
        before = sum(len(message.get("tool_calls", ())) for message in messages)
        numbered = [call_message(call, number) for number, call in enumerate(calls, before)]
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
        assert self._reader is not None
        text = template.call_text(call)
        _, calls = self._reader.read(text)
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


def call_message(call: ParsedCall, number: int) -> Message:
    """As in a message's ``tool_calls``; ids of nine letters and digits, as Mistral wants them."""
    function = {"name": call.name, "arguments": {} if call.error else call.arguments}
    message: Message = {"id": f"call{number:05d}", "type": "function", "function": function}
    return message | ({"error": call.error} if call.error else {})


def _renders_two(template: TurnTemplate, call: ParsedCall) -> bool:
    calls = [call_message(call, number) for number in (0, 1)]
    try:
        template.suffix([], [tool_reply(call, "A result.") for call in calls], calls)
    except ConfigError:
        return False
    return True


def _last_turn(rollout: Rollout) -> list[int]:
    """The tokens that the model wrote since it was last given any."""
    mask = reversed(rollout.loss_mask)
    length = sum(1 for _ in takewhile(bool, mask))
    return rollout.token_ids[len(rollout.token_ids) - length :]


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

    What a tool returns is written as JSON unless it is a text; of a list or dictionary the message
    has the value, too, as ``result``, for rewards. A PIL image is a picture that the model sees,
    and so is each in a list of texts, images and content parts.

    An error is reported to the model: the message's content then starts with ``Error:``, and its
    ``error`` holds the kind: ``unreadable`` (not the parser's format), ``unknown_tool``,
    ``arguments``, ``exception`` or ``timeout``.

    Args:
        functions: tools; see :func:`tool_schema`. ``async`` ones run on the event loop, plain ones
            in a thread each. A thread cannot be stopped: after a timeout it continues unheard, so
            what may hang should be ``async``, or bound itself. ``signal.alarm``, which works in the
            main thread only, costs the rollout.
        call_timeout: seconds that one call may take.
        picture_limits: bounds of pictures that tools show.

    Raises:
        ConfigError: if a function is no tool, or two share a name.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        call_timeout: float,
        picture_limits: PictureLimits = PictureLimits(),
    ) -> None:
        try:
            from pydantic import PydanticUserError, validate_call
        except ImportError as error:
            raise ConfigError(
                "tools need pydantic to check arguments; `pip install 'pydantic>=2.12'`"
            ) from error
        if not call_timeout > 0:
            raise ConfigError(f"call_timeout={call_timeout} must be > 0 seconds")
        if not functions:
            raise ConfigError("tools=[] leaves nothing to call; name at least one function")
        self.schemas = [tool_schema(function) for function in functions]
        self.call_timeout = call_timeout
        self.picture_limits = picture_limits
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
        """Run the calls of one turn side by side; their results in the calls' order.

        Raises:
            EpisodeError: if a tool uses signals, which no tool can.
        """
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
            return _with_result(tool_reply(call, as_content(result, self.picture_limits)), result)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return _error(call, "arguments", "; ".join(wrong))
        except UsesSignals as error:  # no fault of the model's
            raise EpisodeError(
                f"tool {name!r}: {error}, and tools run in others; leave the alarm out, as "
                f"call_timeout={self.call_timeout:g} bounds each call, or let the tool do its work "
                "in a process, by subprocess.run(..., timeout=...)"
            ) from error
        except Exception as error:  # a tool may raise anything; the model sees it
            if isinstance(error, TimeoutError) and limit.expired():
                return _error(call, "timeout", f"{name} took longer than {self.call_timeout:g} s")
            return _error(call, "exception", f"{type(error).__name__}: {error}")


def _error(call: Message, kind: str, text: str) -> Message:
    return tool_reply(call, f"Error: {text}") | {"error": kind}


def _with_result(reply: Message, result: Any) -> Message:
    """The message with a list or dictionary beside its JSON, as a resumed run has it."""
    written = isinstance(result, list | tuple | dict) and isinstance(reply["content"], str)
    return reply | ({"result": json.loads(reply["content"])} if written else {})


async def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if not inspect.iscoroutinefunction(function):
        result, signals = await _threads.call(lambda: _called(function, arguments))
        if signals is not None:
            raise signals
        return result
    try:
        with function_called_here():
            return await function(**arguments)
    except (asyncio.CancelledError, UsesSignals):
        raise
    except BaseException as error:  # SystemExit would end the loop's thread
        raise storable(error) from error


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The result, or why there can be none in this thread."""
    try:
        with function_called_here():
            return function(**arguments), None
    except UsesSignals as error:
        return None, error
