"""Requests and replies of HTTP, as ASGI passes them."""

import json
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning_rl.serving.door import Door
from lightning_rl.serving.errors import RequestError

LARGEST_BODY = 64 * 2**20

Receive = Callable[[], Coroutine[Any, Any, MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]

_RETRY = {False: (b"x-should-retry", b"false"), True: (b"x-should-retry", b"true")}
"""What OpenAI's and Anthropic's clients go by."""


@dataclass(slots=True)
class Reply:
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


def json_reply(value: Any) -> Reply:
    """An object, as JSON."""
    return Reply(json.dumps(value, ensure_ascii=False).encode())


def refusal(door: Door, error: RequestError) -> Reply:
    """An error, in the words of the API that was asked."""
    reply = json_reply(door.error(error))
    reply.status, reply.headers = error.status, (_RETRY[error.retry],)
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


async def read_json(receive: Receive) -> tuple[bytes, Any]:
    """A request's body, and what it says.

    Raises:
        RequestError: if it is too large, or no JSON.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise RequestError(
                f"The request has more than {LARGEST_BODY} bytes", code="too_large", status=413
            )
        more = message.get("more_body", False)
    body = b"".join(parts)
    try:
        return body, json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body of the request is not valid JSON: {error}") from error
