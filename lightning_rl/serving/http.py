"""Requests and replies of HTTP, as ASGI passes them."""

import json
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning_rl.run.files.strict_json import loads
from lightning_rl.serving.api_format import ApiFormat
from lightning_rl.serving.errors import RequestError

Receive = Callable[[], Coroutine[Any, Any, MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]

_NO_RETRY = (b"x-should-retry", b"false")
"""Tells OpenAI's and Anthropic's clients not to retry."""


@dataclass(slots=True)
class Response:
    """An HTTP response."""

    body: bytes
    status: int = 200
    kind: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Send) -> None:
        """Send the whole response."""
        length = (b"content-length", str(len(self.body)).encode())
        headers = [(b"content-type", self.kind), length, *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any) -> Response:
    """Return a response with a value as JSON."""
    return Response(json.dumps(value, ensure_ascii=False).encode())


def refusal(api_format: ApiFormat, error: RequestError) -> Response:
    """Return the response for an error, in the format of the API.

    It closes the connection of a client without a valid key, or whose body was not read completely.
    """
    reply = json_reply(api_format.error(error))
    reply.status, reply.headers = error.status, (_NO_RETRY,)
    if error.status in (401, 413):
        reply.headers += ((b"connection", b"close"),)
    return reply


def is_gone(receive: Receive) -> bool:
    """Tell, without waiting, whether the client closed the connection of a request.

    The request's body must have been read, so that nothing else can come.
    """
    step = receive().__await__()
    try:
        step.send(None)
    except StopIteration as answered:
        return bool(answered.value["type"] == "http.disconnect")
    step.close()
    return False


async def read_body(receive: Receive, most: int) -> bytes:
    """Return a request's body of at most ``most`` bytes; a larger one is read, but not kept.

    So its client sees why it was refused, instead of a closed connection.

    Raises:
        RequestError: if the body is larger, or the client disconnected.
    """
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client disconnected")
        part = message.get("body", b"")
        size += len(part)
        if size <= most:
            parts.append(part)
        more = message.get("more_body", False)
    if size > most:
        raise RequestError(
            f"The request has {size} bytes; this server takes {most} at most. Send a shorter "
            "history, or raise limits.max_bytes",
            code="too_large",
            status=413,
        )
    return b"".join(parts)


def read_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Raises:
        RequestError: if it is not valid JSON, or holds text that cannot be encoded again.
    """
    try:
        return loads(body)
    except ValueError as error:
        raise RequestError(
            f"The body of the request is not valid JSON: {error}", code="invalid_json"
        ) from error
