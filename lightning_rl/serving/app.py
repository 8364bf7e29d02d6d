"""The ASGI application: finds the session of a request, and answers it."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.serving.anthropic import MessagesFormat
from lightning_rl.serving.api_format import ApiFormat
from lightning_rl.serving.ask import Answer
from lightning_rl.serving.errors import RequestError, session_over
from lightning_rl.serving.http import (
    Receive,
    Response,
    Send,
    json_reply,
    read_body,
    read_json,
    refusal,
)
from lightning_rl.serving.openai_chat import ChatCompletionsFormat
from lightning_rl.serving.openai_responses import ResponsesFormat
from lightning_rl.serving.openai_text import CompletionsFormat
from lightning_rl.serving.retries import Pending, Retries
from lightning_rl.serving.session import Session

_log = logging.getLogger(__name__)
_ENDED_KEPT = 10_000
"""Number of ended sessions to remember, so their programs do not get an error of a wrong key."""


@dataclass(slots=True)
class _Guest:
    """A session and its requests."""

    session: Session
    retries: Retries = field(default_factory=Retries)
    answered: int = 0


class AgentApp:
    """Answers requests of all open sessions, which it distinguishes by their keys."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._guests: dict[str, _Guest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._chat = ChatCompletionsFormat()
        self._formats: dict[str, ApiFormat] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": CompletionsFormat(tokenizer),
            "/v1/messages": MessagesFormat(),
            "/v1/responses": ResponsesFormat(),
        }

    def open(self, session: Session) -> None:
        """Answer requests with this session's key."""
        self._guests[session.api_key] = _Guest(session)

    def end(self, session: Session) -> None:
        """Stop answering requests of a session."""
        self._guests.pop(session.api_key, None)
        self._ended[session.api_key] = None
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    async def close(self) -> None:
        """End all sessions."""
        for guest in list(self._guests.values()):
            self.end(guest.session)
            await guest.session.close()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        api_format = self._formats.get(scope["path"], self._chat)
        guest: _Guest | None = None
        try:
            headers = dict(scope["headers"])
            guest, body = await self._admitted(headers, receive)
            if scope["path"] == "/v1/models":
                models = [
                    {"id": name, "object": "model", "created": 0, "owned_by": "lightning_rl"}
                    for name in guest.session.terms.models
                ]
                reply = json_reply({"object": "list", "data": models})
            elif scope["path"] not in self._formats or scope["method"] != "POST":
                asked = f"{scope['method']} {scope['path']:.200}"
                raise RequestError(f"Invalid URL ({asked})", code="unknown_url", status=404)
            else:
                reply = await self._answer(guest, api_format, scope["path"], headers, body, receive)
        except RequestError as error:
            reply = refusal(api_format, error)
        except Exception as error:  # ours: the run is to know, and the client must not hang
            _log.exception("AgentServer cannot answer %s", scope["path"])
            if guest is not None:
                guest.session.failure = guest.session.failure or error
            reply = refusal(
                api_format, RequestError(f"{type(error).__name__}: {error}", status=500)
            )
        await reply.send(send)

    async def _admitted(
        self, headers: Mapping[bytes, bytes], receive: Receive
    ) -> tuple[_Guest, bytes]:
        """Return a request's session and body, read completely so the client sees a refusal."""
        try:
            guest = self._guest(headers)
        except RequestError:
            with suppress(RequestError):  # without a key: nothing of it is kept
                await read_body(receive, 0)
            raise
        return guest, await read_body(receive, guest.session.terms.limits.max_bytes)

    def _guest(self, headers: Mapping[bytes, bytes]) -> _Guest:
        """Return the session of the key, which OpenAI and Anthropic send in different headers."""
        bearer = headers.get(b"authorization", b"").partition(b" ")[2]
        for value in (bearer, headers.get(b"x-api-key", b"")):
            key = value.decode("latin-1").strip()
            if key in self._guests:
                return self._guests[key]
            if key in self._ended:
                raise session_over()
        raise RequestError(
            "Incorrect API key provided; use the one that this program was started with",
            code="invalid_api_key",
            status=401,
        )

    async def _answer(
        self,
        guest: _Guest,
        api_format: ApiFormat,
        path: str,
        headers: Mapping[bytes, bytes],
        body: bytes,
        receive: Receive,
    ) -> Response:
        retries, session = guest.retries, guest.session
        ask = await session.prepare(lambda: api_format.read(read_json(body), session.terms))
        key, retried = retries.name(path, body, headers)
        earlier = retries.earlier(key, retried)
        future = asyncio.get_running_loop().create_future() if earlier is None else earlier
        pending = Pending(receive, future)
        retries.note(key, pending)
        try:
            if earlier is None:
                # Nobody cancels it when its client goes away: it may be asked for again.
                answers = await _filling(future, session.answer(ask))
            else:
                answers = await asyncio.shield(earlier)
        except BaseException:
            retries.forget(key, pending)
            raise
        if not retries.arrives(key, pending):
            session.undelivered(ask, answers)
        if name := headers.get(b"x-session-id"):
            session.name(name.decode("latin-1"))
        guest.answered += 1
        number, now = f"{session.episode.rollout.id}-{guest.answered}", int(time.time())

        def written() -> Response:
            if ask.stream:
                events = b"".join(api_format.stream(ask, answers, number, now))
                return Response(events, kind=b"text/event-stream; charset=utf-8")
            return json_reply(api_format.write(ask, answers, number, now))

        return await session.beside(written)


async def _filling(
    future: asyncio.Future[list[Answer]], answering: Awaitable[list[Answer]]
) -> list[Answer]:
    """Return the answers or raise their error, and set the same on the future."""
    try:
        answers = await answering
    except Exception as error:
        future.set_exception(error)
        future.exception()  # nobody has to wait
        raise
    except asyncio.CancelledError:
        future.cancel()
        raise
    future.set_result(answers)
    return answers
