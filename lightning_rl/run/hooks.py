"""What happens when: hooks beside Lightning's, and a clock that says how long each stage took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict

from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Rollout


class RLCallback(Callback):
    """A Lightning callback that also hears of collection, updates, syncs and finished iterations.

    ``self.log`` is not available in these hooks; use ``pl_module.record({...})``.

    ``reruns`` is True for a callback that has a say in what is learned: ``lightning-rl rerun``
    lets it take part again, and no other.
    """

    reruns = False

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before an iteration's rollouts are generated."""

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        """Called with an iteration's graded rollouts, before they are trained on."""

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        """Called with an iteration's packed batch, advantages included, before the update."""

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before weights are pushed to the engine."""

    def on_weights_synced(self, trainer: Trainer, pl_module: LightningModule, version: int) -> None:
        """Called when the engine has taken over the weights of ``version``."""

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called with all that was recorded for an iteration (also for 0: before training)."""


def call_hook(trainer: Trainer, hook: str, *arguments: Any) -> None:
    """Call an :class:`RLCallback` hook on every callback that has it, in order."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RLCallback):
            getattr(callback, hook)(trainer, trainer.lightning_module, *arguments)


def named_callbacks(which: str, trainer: Trainer) -> list[Callback]:
    """What ``callbacks/defaults.py`` adds to a run; ``which`` of its functions.

    By name, as in a configuration: callbacks know the modules, not the other way round.
    """
    defaults = import_module("lightning_rl.callbacks.defaults")
    added: list[Callback] = getattr(defaults, which)(trainer)
    return added


STAGES = ("generate", "reward", "logprob", "train", "sync", "eval")
"""The library's own. Everything in an iteration that is in no stage is ``other``."""

RESERVED = ("other", "iteration")
"""Names that ``StepTimer`` gives to sums."""


class StageClock:
    """Attributes wall time to named stages; a nested stage stops the outer one (but for ``eval``).

    So the parts never overlap, and together with the rest ("other") sum to the wall time. Any name
    makes a stage: ``with pl_module.clock("simulator"): ...`` is recorded as ``time/simulator``.
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
            ConfigError: for the name of a sum.
        """
        if stage in RESERVED:
            raise ConfigError(
                f"clock({stage!r}): {stage} is what StepTimer calls a sum of stages; name yours "
                "otherwise"
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
        """Seconds per stage since the last call, and start again from zero.

        A stage of one's own stays in the table once it was seen: its column in a log has no gaps.
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
