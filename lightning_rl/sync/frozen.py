"""Frozen weights: pushed once, and left out of later pushes while they do not change."""

from typing import TYPE_CHECKING

from torch import nn

from lightning_rl.engines.push import Push
from lightning_rl.run.processes.dist import any_rank
from lightning_rl.sync.adapters import unit_of

if TYPE_CHECKING:  # an engine's workers import this, and need no model of the trainer's
    from lightning_rl.models.policy import Policy


class FrozenWeights:
    """Tracks the frozen weights of the last push, of one transport to one engine.

    If a frozen weight is modified nevertheless, all are sent again; a write through ``.data``,
    which bypasses PyTorch's version counter, goes unnoticed.
    """

    def __init__(self) -> None:
        self._brought: dict[str, tuple[nn.Parameter, int]] = {}

    def weights_of(self, policy: "Policy", owed: bool) -> Push:
        """Return a policy's weights, without those that the engine keeps; ``owed``: it keeps none.

        All ranks gather sharded weights together, so they decide together. Without sharding each
        rank decides alone: rank 0 may push by itself, as a rerun does.
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
        if whole:
            return Push(policy.named_weights())
        return Push(policy.named_weights(frozen), kept=policy.file_names(frozen))


def _whole_units(policy: "Policy") -> dict[str, nn.Parameter]:
    """Return the weights of completely frozen modules: engines load a module as a whole."""
    frozen, moving = policy.frozen_weights()
    units = {unit_of(name) for name in moving}
    return {name: weight for name, weight in frozen.items() if unit_of(name) not in units}
