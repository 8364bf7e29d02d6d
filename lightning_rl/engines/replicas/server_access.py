"""Access control of a vLLM server: it requires a key, and serves one training run at a time.

Two runs that push to the same server would each sample from weights that the other has changed. A
run therefore claims a server before it uses it, keeps the claim by any request (health checks, if
nothing else), and releases it at its end. The claim of a killed run expires ``lease_s`` seconds
after its last request, so that a resumed run can use the same servers.
"""

import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

RUN_HEADER = "X-Lightning-RL-Run"
"""Header that identifies the run of a request. Requests without it belong to no run, and pass."""
CLAIM = "/lightning_rl/run"
"""PUT claims the server, until ``lease_s`` seconds after the last request; DELETE releases it."""
TAKEN = 409
"""Status code for another run's request; the JSON body has the ``run`` that holds the server, or
null.
"""


@dataclass
class _Holder:
    run: str
    lease_s: float
    seen: float


class ServerAccess:
    """ASGI middleware that checks the key on every path but ``/health``, and the run that asks.

    vLLM's own check does not cover the paths that pause, load weights and call the worker's
    methods.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._expected = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()
        self._holder: _Holder | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path, run = scope["path"], headers.get(RUN_HEADER.lower().encode(), b"").decode()
        if path != "/health" and not self._has_key(headers):
            await _answer(send, 401, "wrong or missing key")
        elif path == CLAIM:
            await self._claim(scope, run, send)
        elif path != "/health" and run and not self._held_by(run):
            await self._refuse(send)
        else:
            if self._holder is not None and self._holder.run == run:
                self._holder.seen = time.monotonic()
            await self.app(scope, receive, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        if self._expected == b"Bearer ":
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected)

    async def _claim(self, scope: Any, run: str, send: Any) -> None:
        holder = self._holder
        free = holder is None or time.monotonic() - holder.seen > holder.lease_s
        if not (run and (free or self._held_by(run))):
            await self._refuse(send)
            return
        lease_s = float(parse_qs(scope["query_string"].decode()).get("lease_s", ["0"])[0])
        gives_up = scope["method"] == "DELETE"
        self._holder = None if gives_up else _Holder(run, lease_s, time.monotonic())
        await _answer(send, 200, json.dumps({"run": None if gives_up else run}))

    def _held_by(self, run: str) -> bool:
        return self._holder is not None and self._holder.run == run

    async def _refuse(self, send: Any) -> None:
        holder = self._holder
        body = {"run": holder.run, "lease_s": holder.lease_s} if holder else {"run": None}
        await _answer(send, TAKEN, json.dumps(body))


async def _answer(send: Any, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json" if text[0] == "{" else b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
