"""A rollout's session: whatever a program asks of models for it, by HTTP or in Python."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from lightning_rl.agents.episode import Episode
from lightning_rl.engines.base import Engine
from lightning_rl.engines.http_replica import ServerRefusal
from lightning_rl.engines.sampling import Completion
from lightning_rl.errors import ConfigError, ContextLengthError, EpisodeError
from lightning_rl.rollout import Call, Message, Rollout
from lightning_rl.run.loop import cancel_here
from lightning_rl.serving.ask import Answer, Ask, Terms
from lightning_rl.serving.chat_format import until_stop
from lightning_rl.serving.errors import (
    RequestError,
    aborted,
    engine_failed,
    session_over,
    too_long,
)
from lightning_rl.serving.history import History
from lightning_rl.serving.messages import Said, read_messages, said
from lightning_rl.serving.openai_chat import ChatDoor

_Calling = Coroutine[Any, Any, tuple[Call, Completion]]


class Session:
    """The door to models for one rollout, while :meth:`AgentServer.session` is open.

    ``base_url`` and ``api_key`` are what OpenAI's clients need, ``anthropic_url`` is the URL for
    Anthropic's. ``episode`` records the calls.
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
        """What went wrong here and not in the program: raised when the session ends."""
        self.failed = asyncio.Event()
        """Set together with ``failure``."""
        self.aborted = False
        """Whether the engine ended a completion early: the rollout is to be made again."""
        self._answering: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._closed = False
        prompt = rollout.prompt.prompt
        self._history = History([] if isinstance(prompt, str) else read_messages(prompt))

    @property
    def messages(self) -> list[Message]:
        """The transcript so far, without the rollout's prompt.

        Each message once, in the order of first appearance, with arguments of calls as objects; of
        several conversations each goes on from what it shares with those before.
        """
        return self._history.transcript

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Answer:
        """The next turn of a chat, without HTTP.

        Args:
            messages: as in a chat completion's request.
            fields: further ones of such a request: ``tools``, ``temperature``, ``model`` ...

        Raises:
            RequestError: for what the endpoint would answer with an error.
        """
        body = {"messages": list(messages), **fields, "n": 1}
        ask, _ = ChatDoor().read(body, self.terms)
        return (await self.answer(ask))[0]

    async def answer(self, ask: Ask) -> list[Answer]:
        """Let the model go on, as often as was asked for; all of it is recorded.

        Raises:
            RequestError: if it cannot, or the session ends meanwhile.
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

    def undelivered(self, ask: Ask, answers: Sequence[Answer]) -> None:
        """Take note that nobody got these: who asks again gets them, or they are dropped."""
        for answer in answers:
            self.episode.undelivered(answer.call)
            self._history.take_back(self._chat_of(ask, answer.prompt_ids), said(answer.message))

    async def close(self) -> None:
        """End it: what is being generated is dropped."""
        self._closed = True
        here = asyncio.get_running_loop()
        self._answering = {task for task in self._answering if task.get_loop() is here}
        for task in self._answering:
            task.cancel()
        if self._answering:
            await self._idle.wait()

    # ---------------------------------------------------------------- inside

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._answering.discard(task)
        if self._closed and not self._answering:
            self._idle.set()

    async def _answer(self, ask: Ask) -> list[Answer]:
        prompts = ask.prompts or [self._chat_prompt(ask)]
        calls = [
            self.episode.call(self.engine, prompt, ask.sampling, ask.role)
            for prompt in prompts
            for _ in range(ask.count)
        ]
        try:
            made = [await calls[0]] if len(calls) == 1 else await self._all_of(calls)
        except ContextLengthError as error:
            lengths = self.engine.max_length, max(map(len, prompts))
            raise too_long(*lengths, "messages" if ask.chat else "prompt") from error
        except EpisodeError as error:
            raise session_over() from error
        except Exception as error:
            if _is_the_clients(error, ask):
                raise RequestError(str(error), code="unsupported_value") from error
            # The run's to handle; a program is only told.
            self.failure = self.failure or error
            self.failed.set()
            raise engine_failed(error) from error
        if any(completion.finish_reason == "abort" for _, completion in made):
            self.aborted = True
            raise aborted()
        asked = [prompt for prompt in prompts for _ in range(ask.count)]
        return [
            self._read(ask, prompt, call, completion)
            for prompt, (call, completion) in zip(asked, made, strict=True)
        ]

    async def _all_of(self, calls: Sequence[_Calling]) -> list[tuple[Call, Completion]]:
        """Several at once. If one fails, or nobody waits any more, none of them is delivered."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            await cancel_here(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    self.episode.undelivered(task.result()[0])
            raise

    def _chat_prompt(self, ask: Ask) -> list[int]:
        assert ask.form is not None
        try:
            prompt = self._history.prompt(ask.chat, ask.form)
        except ConfigError as error:
            raise RequestError(str(error), param="messages", code="invalid_value") from error
        self._history.note(ask.chat)
        return prompt

    def _read(self, ask: Ask, prompt: list[int], call: Call, completion: Completion) -> Answer:
        if ask.form is None:
            return self._read_text(ask, prompt, call, completion)
        before = sum(len(item.message.get("tool_calls", ())) for item in ask.chat)
        reason, ended_by = completion.finish_reason, None
        if ask.must_call:
            name = None if ask.must_call == "*" else ask.must_call
            turn = ask.form.read_forced(completion, name, before)
        else:
            turn, ended_by = ask.form.read(
                completion, ask.sampling.stop, before, ask.may_call, ask.parallel
            )
        if "tool_calls" in turn:
            reason = "tool_calls"
        self._history.answer(ask.chat, said(turn), ask.form, prompt, completion.token_ids)
        return Answer(prompt, completion, call, turn, reason, ended_by)

    def _read_text(self, ask: Ask, prompt: list[int], call: Call, completion: Completion) -> Answer:
        tokenizer = self.terms.formats.tokenizer
        text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        text, ended_by = until_stop(text, ask.sampling.stop)
        turn: Message = {"role": "assistant", "content": text}
        self._history.note([*self._chat_of(ask, prompt), said(turn)])
        return Answer(prompt, completion, call, turn, completion.finish_reason, ended_by)

    def _chat_of(self, ask: Ask, prompt: list[int]) -> list[Said]:
        """What was asked; of a plain prompt, as a chat for whoever reads the transcript."""
        if ask.form is not None:
            return ask.chat
        text = str(self.terms.formats.tokenizer.decode(prompt))
        return [said({"role": "user", "content": text})]


def _is_the_clients(error: Exception, ask: Ask) -> bool:
    """Whether an engine refuses what a client asks for, such as a schema that is none."""
    if isinstance(error, ServerRefusal):
        return error.status == 400 and ask.sampling.structured_outputs is not None
    return isinstance(error, ConfigError)
