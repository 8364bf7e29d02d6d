"""NothingAhead: the part of an update that is done while its batch is still being written."""

from collections.abc import Sequence

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.objective import Objective


class NothingAhead:
    """An update whose batch is complete before anything of it is computed.

    :class:`~lightning_rl.learn.streamed.Stream` overrides every method: it scores groups, and takes
    their gradients, while an engine writes the others.
    """

    metrics: Sequence[Metrics] = ()
    """Metrics of the packs whose gradients are in the policy already."""

    def attach(self, batch: TensorDict) -> None:
        """Take note of the complete batch, before anything else is computed of it."""

    def known(self, name: str) -> Tensor | None:
        """Flags (R,), on the host, of the rows whose column ``name`` is known; None: of no row."""
        return None

    def fill(self, batch: TensorDict, *names: str) -> None:
        """Write the known values of these columns into the batch."""

    def claim(self, batch: TensorDict, objective: Objective, first: Tensor) -> Tensor | None:
        """Flags (R,), on the host, of the rows whose gradient is in the policy already.

        Args:
            batch: the complete batch.
            objective: of the update.
            first: rows (r,) of the first minibatch, the only one with gradients taken ahead.

        Returns:
            None where the update has to compute all gradients itself.
        """
        return None

    def clear(self) -> None:
        """Forget the batch."""
