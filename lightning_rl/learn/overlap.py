"""Overlap: what parts of an update are computed while its batch is still being generated."""

from abc import ABC, abstractmethod

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.objective import Objective
from lightning_rl.run.token_metrics import TokenMetrics


class Overlap(ABC):
    """Computes parts of a learner's update before the batch is complete."""

    @abstractmethod
    def attach(self, batch: TensorDict) -> None:
        """Register the complete batch, before anything else is computed from it."""

    @abstractmethod
    def known(self, name: str) -> Tensor | None:
        """Return flags (R,), on the host, of the rows whose column ``name`` is known; None if no
        row's is.
        """

    @abstractmethod
    def fill(self, batch: TensorDict, *names: str) -> None:
        """Write the known values of these columns into the batch."""

    @abstractmethod
    def complete(
        self, batch: TensorDict, rows: Tensor, objective: Objective, metrics: TokenMetrics
    ) -> bool:
        """Complete the gradient of a minibatch of which some rows' gradients are there already.

        Args:
            batch: the complete batch.
            rows: rows (r,) of the minibatch.
            objective: objective of the update.
            metrics: the metrics of the pass, to which the minibatch's are added.

        Returns:
            False if the learner has to compute the whole gradient itself.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget the batch."""


class NoOverlap(Overlap):
    """An update that starts only when its batch is complete."""

    def attach(self, batch: TensorDict) -> None:
        pass

    def known(self, name: str) -> Tensor | None:
        return None

    def fill(self, batch: TensorDict, *names: str) -> None:
        pass

    def complete(
        self, batch: TensorDict, rows: Tensor, objective: Objective, metrics: TokenMetrics
    ) -> bool:
        return False

    def clear(self) -> None:
        pass
