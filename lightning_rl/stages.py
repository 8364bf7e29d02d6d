"""Which stage a run is in, and how long each stage took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STAGES = ("generate", "reward", "logprob", "train", "sync", "eval")
"""Everything else in an iteration is ``other``."""


class StageClock:
    """Attributes wall time to named stages; a nested stage stops the outer one (but for ``eval``).

    So the parts never overlap, and together with the rest ("other") sum to the wall time.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.listeners: list[Callable[[str], None]] = []
        self._stack: list[str] = []
        self._since = time.perf_counter()

    @property
    def stage(self) -> str:
        """The innermost running stage, or ``other``."""
        return self._stack[-1] if self._stack else "other"

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block: ``with clock("train"): ...``."""
        if self.stage == "eval":  # what an evaluation generates and grades is evaluation
            yield
            return
        self._switch()
        self._stack.append(stage)
        self._notify()
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()
            self._notify()

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call, and start again from zero."""
        self._switch()
        taken, self.seconds = self.seconds, dict.fromkeys(STAGES, 0.0)
        return taken

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _notify(self) -> None:
        for listener in self.listeners:
            listener(self.stage)
