"""An engine made of numbers, for `lightning_rl.simulate`."""

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rl.engines.base import Completion, Engine, Sampling


@dataclass(slots=True, eq=False)
class _Request:
    length: int
    future: asyncio.Future[None]
    written: float = 0.0
    versions: list[int] = field(default_factory=list)


class SimulatedEngine(Engine):
    """Continuous batching: ``n`` running requests get a token each in ``step + n * per_request`` s.

    Args:
        length: tokens of the completion, by the prompt's number and the request's seed.
        step: seconds that a decoding step takes, however many run.
        per_request: seconds that each running request adds to a step.
        max_num_seqs: requests that run together; others wait.
    """

    dtype = "float32"
    running = True
    max_length = 2**62
    version = 0

    def __init__(
        self,
        length: Callable[[int, int], int],
        step: float = 0.02,
        per_request: float = 0.0,
        max_num_seqs: int = 256,
    ) -> None:
        self.length = length
        self.step = step
        self.per_request = per_request
        self.max_num_seqs = max_num_seqs
        self.tokens = 0.0
        self.slot_seconds = 0.0
        self._requests: list[_Request] = []  # the first max_num_seqs of them run
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def start(self, model_dir: Path) -> None:
        """Nothing to build."""

    def close(self) -> None:
        """Nothing to free."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._advance()
        for request in self._requests:
            self._stamp(request)
        self.version = version

    async def pause(self) -> None:
        self._advance()
        self._paused = True
        self._plan()

    async def resume(self) -> None:
        self._advance()
        self._paused = False
        self._plan()

    async def generate(self, token_ids: Any, sampling: Sampling, seed: int) -> Completion:
        length = min(max(1, self.length(token_ids[0], seed)), sampling.max_tokens)
        request = _Request(length, asyncio.get_running_loop().create_future())
        self._advance()
        self._requests.append(request)
        self._plan()
        try:
            await request.future
        finally:
            if request in self._requests:  # it was cancelled
                self._advance()
                self._requests.remove(request)
                self._plan()
        return Completion([0] * length, [0.0] * length, "stop", request.versions)

    def _advance(self) -> None:
        """Credit what was written since the last change."""
        now = asyncio.get_running_loop().time()
        elapsed, self._since = now - self._since, now
        running = self._requests[: self.max_num_seqs]
        if self._paused or not running:
            return
        for request in running:
            request.written += elapsed / self._token_seconds(len(running))
        self.tokens += len(running) * elapsed / self._token_seconds(len(running))
        self.slot_seconds += len(running) * elapsed
        for request in running:
            if request.written > request.length - 1e-6:
                request.written = request.length
                self._stamp(request)
                self._requests.remove(request)
                if not request.future.done():
                    request.future.set_result(None)

    def _plan(self) -> None:
        """Wake up when the next request is done."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        running = self._requests[: self.max_num_seqs]
        if running and not self._paused:
            left = min(request.length - request.written for request in running)
            self._timer = asyncio.get_running_loop().call_later(
                left * self._token_seconds(len(running)), self._wake
            )

    def _wake(self) -> None:
        self._advance()
        self._plan()

    def _stamp(self, request: _Request) -> None:
        done = math.floor(request.written + 1e-6)
        request.versions += [self.version] * (done - len(request.versions))

    def _token_seconds(self, running: int) -> float:
        return self.step + self.per_request * running
