"""Tools: functions that a model may call, and the agent that runs them."""

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
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
    is_over,
    record_turns,
    require_seconds,
    room,
    within,
)
from lightning_rl.agents.templates import (
    HermesParser,
    ParsedCall,
    ToolParser,
    TurnTemplate,
    tool_reply,
)
from lightning_rl.agents.tool_call_parsing import CallReader
from lightning_rl.agents.tool_results import as_content
from lightning_rl.agents.tool_server import ToolServer
from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import tool_names
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, EpisodeError, require_at_least
from lightning_rl.rollout import Message, Rollout
from lightning_rl.run.interpreter import require_docstrings
from lightning_rl.run.loop.threads import CallingThreads, storable
from lightning_rl.run.processes.exits import UsesSignals, function_called_here
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.messages import pictures_of

_threads = CallingThreads("lightning_rl tools")


@configurable
class ToolAgent(Agent):
    """Answers turns with tool calls by the tools' results; a turn without a call is the answer.

    ``rollout.completion`` becomes the list of messages: the model's, with its ``tool_calls``, and
    the tools'. The model's tokens are kept as it wrote them, and only they are trained on. A prompt
    with a column ``tools`` is offered those of the agent's tools that the column names, as it
    describes them.

    ``finish_reason`` is ``stop`` (an answer), ``length`` (``max_tokens``, which also counts the
    results, or the engine's length), ``max_turns`` or ``max_seconds``.

    Args:
        tools: functions with type hints and a docstring (see :func:`tool_schema`), and
            ``MCPTools``, which are all tools of a server.
        parser: reads calls in the model family's format; Hermes by default.
        max_turns: maximum number of the model's turns; calls in the last one are not run.
        max_calls_per_turn: how many calls of one turn are run; each further one is answered by an
            error that says so. None: all of them. Calls whose shortest answers already exceed the
            room left are never run: the rollout ends as ``length``.
        call_timeout: time limit of one call, in seconds.
        max_seconds: maximum wall time of one rollout; None: no limit.
        allow_rewrites: accept a chat template that shows earlier turns differently from how the
            model wrote them.

    Raises:
        ConfigError: for values out of range, or functions that cannot be tools.
    """

    within_max_tokens = True

    def __init__(
        self,
        tools: list[Callable[..., Any]],
        parser: ToolParser | None = None,
        max_turns: int = 8,
        call_timeout: float = 10.0,
        max_seconds: float | None = None,
        allow_rewrites: bool = False,
        max_calls_per_turn: int | None = None,
    ) -> None:
        require_at_least(1, max_turns=max_turns, max_calls_per_turn=max_calls_per_turn)
        require_seconds(max_seconds)
        self.toolbox = Toolbox(tools, call_timeout)
        self.parser = parser or HermesParser()
        self.max_turns = max_turns
        self.max_seconds = max_seconds
        self.allow_rewrites = allow_rewrites
        self.max_calls_per_turn = max_calls_per_turn
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template: TurnTemplate | None = None
        self._reader: CallReader | None = None
        self._one_call = False  # the chat template has no place for two in a turn

    @property
    def chat_options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Tells the chat template of the tools; the first access connects to their servers."""
        return {"tools": self.toolbox.schemas}

    def close(self) -> None:
        self.toolbox.close()
        if self._reader is not None:
            self._reader.close()

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = TurnTemplate(tokenizer, self.chat_options)
        call = call_message(self._sample_call(), 0)
        self._check_rewrites(template)
        self._reader = CallReader(self.parser, tokenizer, self.toolbox.schemas)
        self._check_prompt(template)
        self._check_parser(template, call)
        two = [call_message(self._sample_call(), number) for number in (0, 1)]
        self._one_call = not template.takes(two)
        self._tokenizer, self._template = tokenizer, template

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        if isinstance(rollout.prompt.prompt, str):
            raise ConfigError(
                f"ToolAgent needs chats, but prompt {rollout.prompt.id!r} is plain text, which "
                "cannot show tools; write it as messages"
            )
        messages = [] if isinstance(rollout.completion, str) else rollout.completion
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            messages.pop()  # of a turn that was interrupted; its tokens are still there
        rollout.completion = messages
        conversation = self._converse(rollout, messages, engine, sampling)
        reason = await within(self.max_seconds, conversation, "max_seconds")
        # With calls that were read, it was the results that found no room.
        whole = bool(messages) and "tool_calls" in messages[-1]
        cut = reason == "abort" or (reason == "length" and not whole)
        record_turns(rollout, reason if cut else "stop")
        for call in rollout.calls:
            call.tool_choice = "auto" if rollout.extra.get("tools") else None
        end(rollout, reason)
        return rollout

    async def _converse(
        self, rollout: Rollout, messages: list[Message], engine: Engine, sampling: Sampling
    ) -> str:
        """Take turns until something ends the rollout; return the reason.

        All state is in the rollout, so an interrupted one is resumed from it.
        """
        if self._template is None:
            raise ConfigError("ToolAgent has no tokenizer yet; call configure(tokenizer) first")
        template = self._template.of_row(rollout.prompt.columns, self._check_rewrites)
        offered = template.chat_options["tools"] or []
        rollout.extra["tools"] = [*offered]
        while True:
            if not (messages and messages[-1].get("tool_calls")):
                reason = await self._write(rollout, engine, sampling)
                if reason == "abort":
                    return reason
                if turn := _last_turn(rollout):
                    begun = "" if messages else rollout.prompt.begun
                    whole = reason == "stop"
                    messages.append(await self._read(turn, messages, whole, begun))
                if reason != "stop":
                    return reason
            calls = messages[-1].get("tool_calls")
            if not calls:
                return "stop"
            if sum(message["role"] == "assistant" for message in messages) == self.max_turns:
                return "max_turns"
            turn, left = _last_turn(rollout), room(rollout, engine, sampling)
            if len(template.suffix(turn, [tool_reply(call, "") for call in calls], calls)) >= left:
                return "length"  # whatever the tools answer
            shown = await self.toolbox.answer(calls, self.max_calls_per_turn, tool_names(offered))
            results, pictures = pictures_of(shown, self.toolbox.picture_limits)
            if self.ends_after_calls():
                messages += results
                return "stop"
            suffix, placed = template.seen_suffix(turn, results, pictures, calls)
            if len(suffix) >= left:
                return "length"
            append_given(rollout, suffix, placed)
            messages += results

    def ends_after_calls(self) -> bool:
        """Return True if the rollout ends after the calls of a turn, as some environments say.

        The results then have no reader; here it never does.
        """
        return False

    async def _write(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> str:
        """Let the model finish its turn, and return what ended it."""
        assert self._tokenizer is not None
        turn = _last_turn(rollout)
        if is_over(turn, sampling, self._tokenizer):  # of a rollout that was interrupted then
            return "stop"
        left = room(rollout, engine, sampling)
        if left < 1:
            return "length"
        return (await generate_turn(rollout, engine, sampling, left, len(turn))).finish_reason

    async def _read(
        self, wrote: list[int], messages: list[Message], parse: bool, begun: str = ""
    ) -> Message:
        """Return a turn of the model as a message; ``parse`` is False for one that was cut off."""
        assert self._tokenizer is not None and self._reader is not None
        reader = self._reader
        token_ids = end_tokens_of(self._tokenizer).cut(wrote)
        # Call formats are made of special tokens too.
        text = begun + str(self._tokenizer.decode(token_ids))
        calls: list[ParsedCall] = []
        if parse:
            content, calls = await _threads.call(lambda: reader.read(text))
        if self._one_call and len(calls) > 1:
            calls = [ParsedCall(calls[0].name, error="only one tool may be called per turn")]
        if not calls:
            content = begun + str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
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

    def _check_rewrites(self, template: TurnTemplate) -> None:
        call = call_message(self._sample_call(), 0)
        template.check([tool_reply(call, "A result.")], [call], self.allow_rewrites)

    def _check_prompt(self, template: TurnTemplate) -> None:
        opened = template.render([{"role": "user", "content": "Question?"}])
        for schema in self.toolbox.schemas:
            if schema["function"]["name"] not in opened:
                raise ConfigError(
                    f"the chat template does not show the tool {schema['function']['name']!r} to "
                    "the model; use a template that renders `tools`"
                )

    def _check_parser(self, template: TurnTemplate, call: Message) -> None:
        """Check that the parser reads calls as the template shows them to the model."""
        assert self._reader is not None
        text = template.call_text(call)
        _, calls = self._reader.read(text)
        if [(c.name, c.arguments) for c in calls] != [tuple(call["function"].values())]:
            raise ConfigError(
                f"{type(self.parser).__name__} cannot read tool calls as this chat template "
                f"writes them, {text!r}; choose the parser of the model's family, such as "
                "VLLMParser('llama3_json')"
            )


def _sample(kind: Any) -> Any:
    """Return a sample value of a JSON schema's type."""
    samples = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return samples.get(kind, "text") if isinstance(kind, str) else "text"


def call_message(call: ParsedCall, number: int) -> Message:
    """Return an entry of a message's ``tool_calls``; Mistral wants ids of nine alphanumerics."""
    function = {"name": call.name, "arguments": {} if call.error else call.arguments}
    message: Message = {"id": f"call{number:05d}", "type": "function", "function": function}
    return message | ({"error": call.error} if call.error else {})


def _last_turn(rollout: Rollout) -> list[int]:
    """Return the tokens that the model wrote since it was last given any."""
    mask = reversed(rollout.loss_mask)
    length = sum(1 for _ in takewhile(bool, mask))
    return rollout.token_ids[len(rollout.token_ids) - length :]


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the OpenAI-style JSON schema of a typed function with a Google-style docstring.

    Raises:
        ConfigError: if a type hint or a line of the docstring is missing.
    """
    require_docstrings()
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, AttributeError) as error:
        name = getattr(function, "__qualname__", function)
        raise ConfigError(
            f"{name!r} cannot be a tool: {error}. A tool is a function with a type hint for every "
            "argument, and a docstring that says what it does and, under `Args:`, what each "
            "argument is"
        ) from error
    return schema


class Toolbox:
    """Runs the tool calls of any number of rollouts at once, and answers each with a message.

    A tool's result is written as JSON unless it is a string; if it is a list or dictionary, the
    message also has the value as ``result``, for rewards. The model sees a PIL image as a picture,
    also within a list of texts, images and content parts.

    An error is reported to the model: the message's content then starts with ``Error:``, and its
    ``error`` holds the kind: ``unreadable`` (not the parser's format), ``unknown_tool``,
    ``arguments``, ``exception``, ``timeout`` or ``too_many``.

    Args:
        tools: functions (see :func:`tool_schema`), and servers with tools of their own, which
            check the arguments themselves. ``async`` functions run on the event loop, plain ones
            each in a thread. A thread cannot be stopped: after a timeout it keeps running unheard,
            so a function that may hang should be ``async``, or limit its own time.
            ``signal.alarm`` works in the main thread only; a tool that uses it fails the rollout.
        call_timeout: time limit of one call, in seconds.

    Raises:
        ConfigError: if a function cannot be a tool, or two share a name.
    """

    picture_limits = PictureLimits()
    """Limits of pictures that tools show."""

    def __init__(self, tools: Sequence[Callable[..., Any]], call_timeout: float) -> None:
        try:
            import pydantic
        except ImportError as error:
            raise ConfigError(
                "tools need pydantic to check arguments; `pip install 'pydantic>=2.12'`"
            ) from error
        if not call_timeout > 0:
            raise ConfigError(f"call_timeout={call_timeout} must be > 0 seconds")
        if not tools:
            raise ConfigError("tools=[] leaves nothing to call; name at least one function")
        self.call_timeout = call_timeout
        self._schemas: list[dict[str, Any]] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._servers = [tool for tool in tools if isinstance(tool, ToolServer)]
        self._unknown = [*self._servers]  # those whose tools are not known yet
        for function in tools:
            if not isinstance(function, ToolServer):
                schema = tool_schema(function)
                try:
                    self._add(schema, pydantic.validate_call(function))
                except pydantic.PydanticUserError as error:
                    raise ConfigError(
                        f"arguments of tool {schema['function']['name']!r} cannot be checked: "
                        f"{error}"
                    ) from error

    def _add(self, schema: dict[str, Any], function: Callable[..., Any]) -> None:
        name = schema["function"]["name"]
        if name in self._functions:
            raise ConfigError(f"two tools share the name {name!r}; rename one")
        self._schemas.append(schema)
        self._functions[name] = function

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI-style JSON schemas of the tools; the first access connects to their servers."""
        for server in self._unknown:
            for schema, function in server.tools():
                self._add(schema, function)
        self._unknown = []
        return self._schemas

    def close(self) -> None:
        """Disconnect from the servers; the next call of one of their tools connects again."""
        for server in self._servers:
            server.close()

    async def answer(
        self,
        calls: Sequence[Message],
        limit: int | None = None,
        offered: Collection[str] | None = None,
    ) -> list[Message]:
        """Run the calls of one turn concurrently; return their results in the calls' order.

        Calls beyond the first ``limit``, and of tools other than those ``offered`` (None: all), are
        not run, but answered by an error.

        Raises:
            EpisodeError: if a server was lost, or a tool uses signals, which work in the main
                thread only.
        """
        few = len(calls) if limit is None else limit
        message = f"only {limit} calls of a turn are run; call again for the rest"
        known = [name for name in self._functions if offered is None or name in offered]
        results = await asyncio.gather(*(self._answer(call, known) for call in calls[:few]))
        return [*results, *(_error(call, "too_many", message) for call in calls[few:])]

    async def _answer(self, call: Message, known: Sequence[str]) -> Message:
        from pydantic import ValidationError

        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if "error" in call:
            return _error(call, "unreadable", call["error"])
        if name not in known:
            told = ", ".join(known) or "none"
            return _error(call, "unknown_tool", f"there is no tool {name!r}; there are: {told}")
        if not isinstance(arguments, dict):
            return _error(call, "arguments", "the arguments must be a JSON object")
        try:
            async with asyncio.timeout(self.call_timeout) as limit:
                result = await _run(self._functions[name], arguments)
            return _with_result(tool_reply(call, as_content(result, self.picture_limits)), result)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return _error(call, "arguments", "; ".join(wrong))
        except EpisodeError:  # a server was lost
            raise
        except UsesSignals as error:  # no fault of the model's
            raise EpisodeError(
                f"tool {name!r}: {error}, but tools run in other threads; remove the alarm, since "
                f"call_timeout={self.call_timeout:g} limits each call, or let the tool do its work "
                "in a process with subprocess.run(..., timeout=...)"
            ) from error
        except Exception as error:  # a tool may raise anything; the model sees it
            if isinstance(error, TimeoutError) and limit.expired():
                return _error(call, "timeout", f"{name} took longer than {self.call_timeout:g} s")
            return _error(call, "exception", f"{type(error).__name__}: {error}")


def _error(call: Message, kind: str, text: str) -> Message:
    return tool_reply(call, f"Error: {text}") | {"error": kind}


def _with_result(reply: Message, result: Any) -> Message:
    """Return the message, with a list or dictionary as ``result``, read back from its JSON.

    A resumed run has the same value.
    """
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
    """Return the result and None, or None and the error if the function uses signals."""
    try:
        with function_called_here():
            return function(**arguments), None
    except UsesSignals as error:
        return None, error
