"""CollectingDataModule: what callbacks and commands need from data that the policy generates."""

import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_rl.collect.loader import EpochLoader, LazyLoader, limited_epoch
from lightning_rl.run.files.rundir import require_writable_dirs


class Hanging(NamedTuple):
    """A call into foreign code, such as a reward or an environment, that has not returned yet."""

    what: str
    thread: threading.Thread
    advice: str
    """What to do if the call may take that long, as the beginning of a sentence."""


class CollectingDataModule(LightningDataModule, ABC):
    """Collects the training data, one batch per iteration, and evaluates the current policy.

    Subclasses must begin ``setup`` with ``enter_directory(trainer)`` and end ``teardown`` with
    ``leave_directory(trainer)``, because a run directory belongs to one process at a time.
    """

    nothing_to_evaluate = "use a data module that can evaluate"
    """Advice to the user if ``evaluates`` is False."""
    test_series: LazyLoader | None = None
    """The loader that ``test`` uses instead of a single evaluation, to evaluate several
    checkpoints.
    """
    collects = "rollout"
    """What this data module collects, as a singular noun."""
    iterations_per_epoch: int
    _loader: EpochLoader | None = None
    _loader_state: dict[str, Any] | None = None  # of a checkpoint, for the next loader

    def hanging(self) -> Hanging | None:
        """Return the call of a reward or an environment that is running in its own thread; None if
        none.
        """
        return None

    def check(self, module: LightningModule) -> list[str] | None:
        """Try out a run with this module, and return lines of a report for ``lightning-rl check``.

        Both already have their trainer. Returns None if there is nothing to try out.
        """
        return None

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """True if there is anything to evaluate on."""

    @abstractmethod
    def evaluate(self) -> tuple[Any, dict[str, float]]:
        """Evaluate the current policy on held-out tasks, with the same seeds every time.

        Returns:
            What the policy did (rollouts or episodes), and its ``eval/...`` metrics; the same on
            all ranks.

        Raises:
            ConfigError: if there is nothing to evaluate on.
        """

    def scores(self, done: Any) -> dict[str, dict[str, float]]:
        """Return scores of what :meth:`evaluate` returned, by their name and then by held-out task.

        Two evaluations can be compared task by task then; {} if tasks cannot be told apart.
        """
        return {}

    def prepare_data(self) -> None:
        """Fail early if loggers cannot create their directories."""
        if self.trainer is not None and self.trainer.state.fn == "fit":
            require_writable_dirs(self.trainer)

    def new_loader(self) -> EpochLoader:
        """Return a loader of a run's iterations, for the default ``train_dataloader``."""
        raise NotImplementedError(f"{type(self).__name__}.new_loader")

    def train_dataloader(self) -> Any:
        """Return a new loader, which resumes where the checkpoint of this run was taken."""
        self._loader = self.new_loader()
        if self._loader_state is not None:
            self._loader.load_state_dict(self._loader_state)
            self._loader_state = None
        return self._loader

    # Lightning restores a loader's own state only if the checkpoint was taken within an epoch.
    def state_dict(self) -> dict[str, Any]:
        return {"loader": None if self._loader is None else self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader_state = state_dict["loader"]

    def _epoch(self) -> int:
        """Return the number of iterations in an epoch, within the Trainer's limits."""
        length = self.iterations_per_epoch
        return length if self.trainer is None else limited_epoch(self.trainer, length)

    def val_dataloader(self) -> Any:
        """Return a loader of one evaluation, or [] during ``fit``.

        During ``fit`` the ``Evaluate`` callback evaluates instead, also before training.
        """
        if self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._one_evaluation()

    def test_dataloader(self) -> Any:
        """Return a loader of one evaluation, or of one per checkpoint if there are several."""
        return self._one_evaluation() if self.test_series is None else self.test_series

    def _one_evaluation(self) -> LazyLoader:
        return LazyLoader(lambda _: self.evaluate()[1], 1)
