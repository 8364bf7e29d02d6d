"""A rollout's session: all model calls of its program, by HTTP or in Python."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from lightning_rl.agents.episode import Episode
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, seed_of
from lightning_rl.errors import (
    ConfigError,
    ContextLengthError,
    EpisodeError,
    PictureError,
    ServerRefusal,
)
from lightning_rl.rollout import Call, Message, Rollout
from lightning_rl.run.loop.background import cancel_here
from lightning_rl.run.loop.threads import CallingThreads
from lightning_rl.serving.ask import Answer, Ask, Terms
from lightning_rl.serving.chat_format import until_stop
from lightning_rl.serving.chats import RequestChat
from lightning_rl.serving.errors import RequestError, session_over
from lightning_rl.serving.history import History
from lightning_rl.serving.messages import said
from lightning_rl.serving.openai_chat import ChatCompletionsFormat

T = TypeVar("T")
_LONGEST_NAME = 200
_threads = CallingThreads("lightning_rl requests")
_Calling = Coroutine[Any, Any, tuple[Call, Completion]]


class Session:
    """Access to models for one rollout, while :meth:`AgentServer.session` is open.

    OpenAI's clients need ``base_url`` and ``api_key``; ``anthropic_url`` is the URL for Anthropic's
    clients. ``episode`` records the calls.
    """

    def __init__(
        self,
        rollout: Rollout,
        engine: Engine,
        terms: Terms,
        url: str,
        api_key: str,
    ) -> None:
        self.engine = engine
        self.terms = terms
        self.anthropic_url = url
        self.base_url = f"{url}/v1"
        self.api_key = api_key
        self.episode = Episode(rollout)
        self.failure: Exception | None = None
        """An error of the engine or server, not of the program; raised when the session ends."""
        self.failed = asyncio.Event()
        """Set together with ``failure``."""
        self.aborted = False
        """Whether the engine aborted a completion: the rollout has to be repeated."""
        self._answering: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._order = asyncio.Lock()
        self._closed = False
        rollout.extra.pop("tools", None)  # of an interrupted attempt
        self.name(f"{seed_of(f'{rollout.own_seed}/session'.encode()):016x}")
        self._history = History(rollout, terms.chats.prompt(rollout.prompt))

    @property
    def messages(self) -> list[Message]:
        """The transcript so far, without the rollout's prompt.

        Each message appears once, in the order of its first appearance, with arguments of calls as
        objects; a conversation adds only what it does not share with earlier ones.
        """
        return self._history.transcript

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """Return the next turn of a chat, without HTTP.

        Args:
            messages: as in a chat completion's request.
            fields: other fields of such a request: ``tools``, ``temperature``, ``model`` ...

        Raises:
            RequestError: if the endpoint would answer with an error.
        """
        body = {"messages": list(messages), **fields, "n": 1}
        ask = await self.prepare(lambda: ChatCompletionsFormat().read(body, self.terms))
        return (await self.answer(ask))[0]

    async def prepare(self, read: Callable[[], Ask]) -> Ask:
        """Read a request and tokenize its prompts, in a thread (:meth:`beside`).

        Raises:
            RequestError: if the request is invalid, or reading takes too long.
        """

        def work() -> Ask:
            ask = read()
            if ask.form is not None:
                try:
                    token_ids, ask.placed = self._history.prompt(ask.chat, ask.form)
                except (ConfigError, PictureError) as error:
                    told = str(error)
                    raise RequestError(told, param="messages", code="invalid_value") from error
                ask.prompts = [token_ids]
            return ask

        return await self.beside(work)

    async def beside(self, work: Callable[[], T]) -> T:
        """Return a result computed in a thread, so that only this session waits for it.

        Work runs one at a time, in the order of the requests, so that calls keep that order.

        Raises:
            RequestError: if it takes longer than ``limits.max_seconds``.
        """
        seconds = self.terms.limits.max_seconds
        async with self._order:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    result: T = await _threads.call(work)
                    return result
            except TimeoutError as error:
                if limit.expired():
                    raise RequestError(
                        f"It took more than {seconds:g} s to read and tokenize the request; send "
                        "less at once, or raise limits.max_seconds",
                        code="too_slow",
                    ) from error
                raise
            except IndexError as error:
                if self._closed:  # its rows may have been cut anew meanwhile
                    raise session_over() from error
                raise

    async def answer(self, ask: Ask) -> list[Answer]:
        """Generate the requested answers, and record them.

        Raises:
            RequestError: if that is not possible, or the session ends meanwhile.
        """
        if self._closed:
            raise session_over()
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await self._answer(ask)
        except asyncio.CancelledError:
            if self._closed:
                raise session_over() from None
            raise
        finally:
            self._leave(task)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._answering.discard(task)
        if self._closed and not self._answering:
            self._idle.set()

    def undelivered(self, ask: Ask, answers: Sequence[Answer]) -> None:
        """Note answers that were not delivered: a repetition gets them, or they are dropped."""
        for answer in answers:
            self.episode.undelivered(answer.call)
            self._history.take_back(self._chat_of(ask, answer), said(answer.message))

    def name(self, name: str) -> None:
        """Record the session's name, if a client gives it one."""
        self.episode.rollout.extra["session_id"] = name[:_LONGEST_NAME]

    async def close(self) -> None:
        """Close the session, and drop answers being generated."""
        self._closed = True
        here = asyncio.get_running_loop()
        self._answering = {task for task in self._answering if task.get_loop() is here}
        for task in self._answering:
            task.cancel()
        if self._answering:
            await self._idle.wait()
        self.episode.settle()

    # ---------------------------------------------------------------- inside

    async def _answer(self, ask: Ask) -> list[Answer]:
        before = self._history.note(ask.chat)
        if ask.tools:
            known = self.episode.rollout.extra.setdefault("tools", [])
            known += [tool for tool in ask.tools if tool not in known]
        asked = [prompt for prompt in ask.prompts for _ in range(ask.count)]
        calls = [
            self.episode.call(self.engine, prompt, ask.sampling, ask.role, ask.placed)
            for prompt in asked
        ]
        try:
            made = [await calls[0]] if len(calls) == 1 else await self._all_of(calls)
        except ContextLengthError as error:
            param = "prompt" if ask.form is None else "messages"
            raise RequestError(
                f"This model's maximum context length is {self.engine.max_length} tokens. However, "
                f"your {param} resulted in {max(map(len, asked))} tokens. Please reduce the length "
                f"of the {param}.",
                param=param,
                code="context_length_exceeded",
            ) from error
        except EpisodeError as error:
            raise session_over() from error
        except Exception as error:
            if _is_the_clients(error, ask):
                raise RequestError(str(error), code="unsupported_value") from error
            # For the run to handle; a program only gets the error.
            self.failure = self.failure or error
            self.failed.set()
            told = f"The engine failed: {error}"
            raise RequestError(told, code="engine_error", status=500) from error
        if any(completion.finish_reason == "abort" for _, completion in made):
            self.aborted = True
            told = "The engine was interrupted"
            raise RequestError(told, code="engine_interrupted", status=503)
        for call, _ in made:
            call.tool_choice = ask.tool_choice
        completions = [completion for _, completion in made]
        try:
            turns = await self.beside(lambda: [self._turn(ask, c, before) for c in completions])
        except BaseException:
            # Nobody gets them. Of a rollout that is to be made again they are kept all the same.
            for call, _ in made if not self.aborted else ():
                self.episode.undelivered(call)
            raise
        return [
            self._keep(ask, number // ask.count, call, completion, turn)
            for number, ((call, completion), turn) in enumerate(zip(made, turns, strict=True))
        ]

    async def _all_of(self, calls: Sequence[_Calling]) -> list[tuple[Call, Completion]]:
        """Await several calls at once; after a failure or cancellation none counts as delivered."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            await cancel_here(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    self.episode.undelivered(task.result()[0])
            raise

    def _turn(self, ask: Ask, completion: Completion, before: int) -> tuple[Message, str | None]:
        """Return the model's turn as a message, and the stop string that ended it, if any."""
        if ask.form is None:
            tokenizer = self.terms.formats.tokenizer
            said = end_tokens_of(tokenizer).cut(completion.token_ids)
            text = str(tokenizer.decode(said, skip_special_tokens=True))
            text, ended_by = until_stop(text, ask.sampling.stop)
            return {"role": "assistant", "content": text}, ended_by
        if ask.must_call:
            name = None if ask.must_call == "*" else ask.must_call
            return ask.form.read_forced(completion, name, before), None
        return ask.form.read(completion, ask.sampling.stop, before, ask.may_call, ask.parallel)

    def _keep(
        self,
        ask: Ask,
        prompt: int,
        call: Call,
        completion: Completion,
        read: tuple[Message, str | None],
    ) -> Answer:
        turn, ended_by = read
        reason = "tool_calls" if "tool_calls" in turn else completion.finish_reason
        row = self.episode.rollout.rows[call.row]
        answer = Answer(row, call.start, prompt, completion, call, turn, reason, ended_by)
        self._history.answer(self._chat_of(ask, answer), said(turn), ask.form, call)
        return answer

    def _chat_of(self, ask: Ask, answer: Answer) -> RequestChat:
        """Return the request's chat; a plain prompt becomes a chat, for the transcript."""
        if ask.form is not None:
            return ask.chat
        text = self.terms.formats.tokenizer.decode(answer.prompt_ids)
        return RequestChat([said({"role": "user", "content": str(text)})])


def _is_the_clients(error: Exception, ask: Ask) -> bool:
    """Tell whether an engine's error is the client's fault, such as an invalid schema."""
    if isinstance(error, ServerRefusal):
        return error.status == 400 and ask.sampling.structured_outputs is not None
    return isinstance(error, ConfigError)
