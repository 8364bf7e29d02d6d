"""Weights that nothing trains: a push brings them once, and leaves them out while they stay so.

In a push a tensor on the ``meta`` device, which has a shape and no numbers, stands for a weight
that is left out: whoever takes the push keeps what an earlier one has brought.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_rl.run.dist import any_rank
from lightning_rl.sync.adapters import unit_of

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy


class FrozenWeights:
    """What the push before has brought of frozen weights; it is one transport's to one engine.

    A weight that is written over all the same is noticed, and all are sent again; one that is
    written through ``.data``, past PyTorch's count of changes, is not.
    """

    def __init__(self) -> None:
        self._brought: dict[str, tuple[nn.Parameter, int]] = {}

    def weights_of(self, policy: "Policy", owed: bool) -> Iterator[tuple[str, Tensor]]:
        """All of a policy's weights, those left out as ``meta`` tensors; ``owed``: whole.

        Sharded weights are gathered by all ranks, so these decide together, and all have to go
        through them. Others are a rank's own affair: rank 0 may push alone, as a rerun does.
        """
        frozen = _whole_units(policy)
        same = frozen.keys() == self._brought.keys() and all(
            parameter is before and parameter._version == version
            for parameter, (before, version) in zip(
                frozen.values(), self._brought.values(), strict=True
            )
        )
        self._brought = {name: (weight, weight._version) for name, weight in frozen.items()}
        whole = owed or not same
        if policy.sharded:
            whole = any_rank(whole)
        yield from policy.named_weights(() if whole else frozen)


def _whole_units(policy: "Policy") -> dict[str, nn.Parameter]:
    """Frozen weights of those modules of which all is: engines load a module as a whole."""
    frozen, moving = policy.frozen_weights()
    units = {unit_of(name) for name in moving}
    return {name: weight for name, weight in frozen.items() if unit_of(name) not in units}
