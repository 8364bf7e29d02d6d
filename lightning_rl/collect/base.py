"""CollectingDataModule: what callbacks and commands ask of data that a policy makes by itself."""

import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_rl.collect.loader import LazyLoader
from lightning_rl.run.rundir import require_writable_dirs


class Hanging(NamedTuple):
    """A call of code that is not ours, and that has not returned yet."""

    what: str
    thread: threading.Thread
    advice: str
    """What to do if it may take that long, as the beginning of a sentence."""


class CollectingDataModule(LightningDataModule, ABC):
    """Collects what is trained on, one batch per iteration, and evaluates the present policy.

    ``setup`` begins with ``enter_directory(trainer)``, and ``teardown`` ends with
    ``leave_directory(trainer)``: a run directory belongs to one process at a time.
    """

    nothing_to_evaluate = "use a data module that can evaluate"
    """Advice, where ``evaluates`` is False."""
    test_series: LazyLoader | None = None
    """What ``test`` goes through in place of one evaluation; of several checkpoints."""
    collects = "rollout"
    """What it collects, in a word."""

    def hanging(self) -> Hanging | None:
        """A call that runs in a thread of its own right now, of a reward or an environment."""
        return None

    def check(self, module: LightningModule) -> list[str] | None:
        """Try out a run with this module, and say what it amounts to, for ``lightning-rl check``.

        None: there is nothing to try. Both know the trainer already.
        """
        return None

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""

    @abstractmethod
    def evaluate(self) -> tuple[Any, dict[str, float]]:
        """What the present policy does on held-out tasks, with the same seeds each time.

        Returns:
            What it did, and metrics of that, named ``eval/...``; the same on all ranks.

        Raises:
            ConfigError: if there is nothing to evaluate on.
        """

    def prepare_data(self) -> None:
        """Before loggers make their directories: can they?"""
        if self.trainer is not None and self.trainer.state.fn == "fit":
            require_writable_dirs(self.trainer)

    def val_dataloader(self) -> Any:
        """One evaluation; [] while fitting, when the ``Evaluate`` callback does it.

        That also evaluates before training.
        """
        if self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._one_evaluation()

    def test_dataloader(self) -> Any:
        """One evaluation, or one for each of several checkpoints."""
        return self._one_evaluation() if self.test_series is None else self.test_series

    def _one_evaluation(self) -> LazyLoader:
        return LazyLoader(lambda _: self.evaluate()[1], 1)
