"""NothingAhead: the default, in which no part of an update is computed before its batch is
complete.
"""

from collections.abc import Sequence

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Objective


class NothingAhead:
    """An update that starts only when its batch is complete.

    :class:`~lightning_rl.learn.streamed.Stream` overrides every method: it scores groups and
    computes their gradients while an engine generates the others.
    """

    metrics: Sequence[Metrics] = ()
    """Metrics of the packs whose gradients have already been added."""

    def attach(self, batch: TensorDict) -> None:
        """Register the complete batch, before anything else is computed from it."""

    def known(self, name: str) -> Tensor | None:
        """Return flags (R,), on the host, of the rows whose column ``name`` is known; None if no
        row's is.
        """
        return None

    def fill(self, batch: TensorDict, *names: str) -> None:
        """Write the known values of these columns into the batch."""

    def claim(self, batch: TensorDict, objective: Objective, first: Tensor) -> Tensor | None:
        """Return flags (R,), on the host, of the rows whose gradient has already been added.

        Args:
            batch: the complete batch.
            objective: objective of the update.
            first: rows (r,) of the first minibatch, the only one with gradients computed ahead.

        Returns:
            None if the update has to compute all gradients itself.
        """
        return None

    def clear(self) -> None:
        """Forget the batch."""
