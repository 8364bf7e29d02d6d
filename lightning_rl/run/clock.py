"""StageClock: measures the time of each stage of an iteration."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_rl.errors import ConfigError

STAGES = ("generate", "reward", "logprob", "train", "sync", "digests", "eval")
"""The library's own stages. The rest of an iteration is ``other``."""

RESERVED = ("other", "iteration")
"""Names that ``StepTimer`` gives to sums."""


class StageClock:
    """Attributes wall time to named stages; a nested stage pauses the outer one (except ``eval``).

    So stages never overlap, and together with the rest ("other") they sum to the wall time. Any
    name makes a stage: ``with pl_module.clock("simulator"): ...`` is recorded as
    ``time/simulator``.
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
        """Time a block: ``with clock("train"): ...``.

        Raises:
            ConfigError: if the name is reserved for a sum.
        """
        if stage in RESERVED:
            raise ConfigError(
                f"clock({stage!r}): StepTimer uses the name {stage} for a sum of stages; choose "
                "another name"
            )
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
        """Return the seconds per stage since the last call, and start again from zero.

        A user's own stage stays in the table once it was used, so that its column in a log has no
        gaps.
        """
        self._switch()
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            stage = self._stack[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def _notify(self) -> None:
        for listener in self.listeners:
            listener(self.stage)
