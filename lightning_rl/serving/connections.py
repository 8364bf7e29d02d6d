"""Connections that are closed unless they send a request in time."""

import asyncio
import json
from typing import Any

LARGEST_HEAD = 2**16
"""Maximum bytes of a request's line and headers, as in uvicorn's other parser."""
_LINGER_S = 1.0
"""Seconds to keep reading from a refused client: closed at once, it would miss the refusal."""


def with_deadlines(protocol: Any, seconds: float) -> Any:
    """Return uvicorn's protocol, closing connections that send no whole request in ``seconds``.

    The time starts when the connection opens, and with the first byte of each further request.
    uvicorn handles connections that wait for an answer, or are idle after one.
    """

    class WithDeadlines(protocol):
        _due: asyncio.TimerHandle | None = None
        _head = 0
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._due is None:
                self._expect()
            super().data_received(data)
            self._head = 0 if self._is_answering() else self._head + len(data)
            if self._is_answering() and not self.cycle.more_body:  # the request is whole
                self._no_longer_expect()
            elif self._head > LARGEST_HEAD:
                told = f"The headers have more than {LARGEST_HEAD} bytes; send fewer"
                self._refuse(b"431 Request Header Fields Too Large", told)

        def connection_lost(self, exc: Exception | None) -> None:
            self._no_longer_expect()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._due = asyncio.get_running_loop().call_later(seconds, self._give_up)

        def _no_longer_expect(self) -> None:
            if self._due is not None:
                self._due.cancel()
                self._due = None

        def _is_answering(self) -> bool:
            """Tell whether a request's body is being read, or its answer made."""
            return self.cycle is not None and not self.cycle.response_complete

        def _give_up(self) -> None:
            told = f"No whole request came within {seconds:g} s (limits.max_wait_s)"
            self._refuse(b"408 Request Timeout", told)

        def _refuse(self, status: bytes, told: str) -> None:
            """Send the reason in the form of OpenAI's API, and close."""
            self._no_longer_expect()
            if self.transport.is_closing():
                return
            self._refused = True
            error = {"message": told, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + length + body)
            self.transport.write_eof()
            self._due = asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)

    return WithDeadlines
