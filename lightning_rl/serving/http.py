"""Requests and replies of HTTP, as ASGI passes them."""

import json
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning_rl.run.strict_json import loads
from lightning_rl.serving.door import Door
from lightning_rl.serving.errors import RequestError, too_large

Receive = Callable[[], Coroutine[Any, Any, MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]

_RETRY = {False: (b"x-should-retry", b"false"), True: (b"x-should-retry", b"true")}
"""What OpenAI's and Anthropic's clients go by."""


@dataclass(slots=True)
class Response:
    """What is sent back."""

    body: bytes
    status: int = 200
    kind: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Send) -> None:
        """Send all of it."""
        length = (b"content-length", str(len(self.body)).encode())
        headers = [(b"content-type", self.kind), length, *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any) -> Response:
    """An object, as JSON."""
    return Response(json.dumps(value, ensure_ascii=False).encode())


def refusal(door: Door, error: RequestError) -> Response:
    """An error, in the format of the API.

    Who has no key, or has not been read to the end, has no use for the connection.
    """
    reply = json_reply(door.error(error))
    reply.status, reply.headers = error.status, (_RETRY[error.retry],)
    if error.status in (401, 413):
        reply.headers += ((b"connection", b"close"),)
    return reply


def is_gone(receive: Receive) -> bool:
    """Whether the client of a request, whose body has been read, closed the connection.

    Asks without waiting: nothing else can come any more.
    """
    step = receive().__await__()
    try:
        step.send(None)
    except StopIteration as answered:
        return bool(answered.value["type"] == "http.disconnect")
    step.close()
    return False


async def read_body(receive: Receive, most: int) -> bytes:
    """A request's body, of at most so many bytes; the rest is read, but not kept.

    So its client hears why it was refused, and not only that the connection was closed.

    Raises:
        RequestError: if it is larger, or its client went away.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size <= most:
            parts.append(part)
        more = message.get("more_body", False)
    if size > most:
        raise too_large(size, most)
    return b"".join(parts)


def read_json(body: bytes) -> Any:
    """The content of a body.

    Raises:
        RequestError: if it is no JSON, or holds what no answer could repeat.
    """
    try:
        return loads(body)
    except ValueError as error:
        raise RequestError(
            f"The body of the request is not valid JSON: {error}", code="invalid_json"
        ) from error
