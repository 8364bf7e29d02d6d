"""Repeated requests whose answer was lost: they get the original answer."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from lightning_rl.serving.ask import Answer
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.http import Receive, is_gone


@dataclass(slots=True, eq=False)
class Pending:
    """A waiting client, by its connection, and the answers that it waits for."""

    receive: Receive
    answers: asyncio.Future[list[Answer]]

    def is_lost(self) -> bool:
        """Tell whether the client has disconnected."""
        return is_gone(self.receive)


class Retries:
    """The requests of one session, by their content or by the keys that clients give them.

    The same content again is a new request and gets a new sample, as from any server, unless the
    earlier client disconnected without its answer, or this one says that it retries.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[bytes, list[Pending]] = defaultdict(list)
        self._last: dict[bytes, asyncio.Future[list[Answer]]] = {}
        self._keyed: dict[bytes, bytes] = {}
        """Requests by the keys that clients gave them."""

    def name(self, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> tuple[bytes, bool]:
        """Return the key of a request, and whether its client says that it is a retry.

        Raises:
            RequestError: if it has the idempotency key of another request.
        """
        asked = _digest(path.encode() + b" " + body)
        key = headers.get(b"idempotency-key")
        if not key:
            return asked, headers.get(b"x-stainless-retry-count", b"0") != b"0"
        if self._keyed.setdefault(_digest(key), asked) != asked:
            raise RequestError(
                f"Idempotency-Key {key.decode('latin-1')!r:.80} was sent with another request "
                "before; send exactly the same body again, or use a new key",
                param="Idempotency-Key",
                code="idempotency_error",
            )
        return b"key " + _digest(key), True

    def earlier(self, key: bytes, retried: bool) -> asyncio.Future[list[Answer]] | None:
        """Return the recorded answers to this request, if they were asked before and lost."""
        waiting = self._waiting[key]
        lost = next((pending for pending in waiting if pending.is_lost()), None)
        if lost is not None:
            waiting.remove(lost)
            return lost.answers
        return self._last.get(key) if retried else None

    def note(self, key: bytes, pending: Pending) -> None:
        """Record a request while its answer is being made."""
        self._waiting[key].append(pending)
        self._last[key] = pending.answers

    def arrives(self, key: bytes, pending: Pending) -> bool:
        """Mark a request's answer as sent; return False if no client waits for it.

        An answer that another request has taken over is sent by that request.
        """
        if pending not in self._waiting[key]:
            return True
        self._waiting[key].remove(pending)
        arrives = not pending.is_lost()
        if not arrives:
            self.forget(key, pending)
        return arrives

    def forget(self, key: bytes, pending: Pending) -> None:
        """Forget a request without an answer, so that a repetition is a new request."""
        if pending in self._waiting[key]:
            self._waiting[key].remove(pending)
        if self._last.get(key) is pending.answers:
            del self._last[key]


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
