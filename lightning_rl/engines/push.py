"""Push: a version's weights on their way to an engine, and the loop that all of them pass."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_rl.errors import IncompleteWeightsError


@dataclass(frozen=True, slots=True)
class HeldDigests:
    """Digests of the weights in one process, read from the tensors that it computes with.

    Args:
        holder: name of the process, for messages.
        digests: digest of each weight in the engine's dtype, by the name in a push.
        unread: why other weights cannot be compared, by name.
    """

    holder: str
    digests: Mapping[str, str]
    unread: Mapping[str, str] = field(default_factory=dict)


class PushRecord(Protocol):
    """The part of a record of pushed weights that a push uses: see ``SentWeights``."""

    def note(self, name: str, weight: Tensor) -> None: ...
    def require_held(self, ask: Callable[[Sequence[str]], list[HeldDigests]]) -> int: ...


class Push:
    """The weights of one version, one at a time, under their Hugging Face names.

    Sharded weights are gathered by all ranks together, each when its turn comes. So every rank has
    to go through all of them, once, even if it pushes nothing or has failed (:meth:`exhaust`).

    Args:
        weights: the weights that come.
        kept: names of those that do not come, because the engine keeps them from an earlier push.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], kept: Collection[str] = frozenset()
    ) -> None:
        self._weights, self.kept = iter(weights), kept
        self.ledger: PushRecord | None = None
        """Notes each weight; None: nobody does."""

    @classmethod
    def of(cls, weights: Iterable[tuple[str, Tensor]]) -> "Push":
        """Return the weights as a push that keeps none, unless they are a push already."""
        return weights if isinstance(weights, Push) else cls(weights)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.checked(None)

    def checked(
        self, shapes: Mapping[str, torch.Size] | None, engine: str = "the engine"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, each checked against the engine's shapes; None: these are not known.

        Raises:
            IncompleteWeightsError: if a weight is unknown, of another shape, or missing; names it.
        """
        came = set(self.kept)
        for name, weight in self._weights:  # it is gathered here
            if shapes is not None and weight.shape != shapes.get(name):
                shape = shapes.get(name)
                found = " has none of that name" if shape is None else f"'s is {tuple(shape)}"
                raise IncompleteWeightsError(
                    f"the push contains {name!r} of shape {tuple(weight.shape)}, but {engine}"
                    f"{found}; is its model the trainer's?"
                )
            if self.ledger is not None:
                self.ledger.note(name, weight)
            came.add(name)
            yield name, weight
        if shapes is not None and (missing := sorted(shapes.keys() - came)):
            raise IncompleteWeightsError(
                f"the push lacks {len(missing)} of {engine}'s weights, first {missing[0]!r}; is "
                "its model the trainer's?"
            )

    def exhaust(self) -> None:
        """Go through all weights that are left."""
        for _ in self:
            pass


def require_same_weights(
    pushed: Mapping[str, Tensor], expected: Mapping[str, torch.Size], engine: str
) -> None:
    """Check names and shapes of a push before an engine changes anything.

    Raises:
        IncompleteWeightsError: if a weight is unknown, of another shape, or missing; names it.
    """
    for _ in Push(pushed.items()).checked(expected, engine):
        pass
