"""Memory that operations allocate while a model computes, until it is freed."""

from collections.abc import Iterable, Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(NamedTuple):
    """Bytes that are allocated at the same time.

    ``states`` grow with tokens, and so do ``masks`` of attention; ``logits`` grow up to a chunk.
    ``copies`` have the shapes of weights: autocast's copies, and gradients not accumulated yet.
    ``gradients`` are those of weights, ``summed`` those of layers that are done.
    """

    states: int = 0
    masks: int = 0
    logits: int = 0
    copies: int = 0
    gradients: int = 0
    summed: int = 0

    @property
    def grows(self) -> int:
        """All bytes that grow with tokens."""
        return self.states + self.masks

    def of(self, tokens: float, chunk: float) -> "Held":
        """Scale to ``tokens`` times as many tokens, and a ``chunk`` times as large."""
        return self._replace(
            states=round(self.states * tokens),
            masks=round(self.masks * tokens),
            logits=round(self.logits * chunk),
        )


def largest(points: Iterable[Held]) -> tuple[Held, ...]:
    """Return the Pareto-maximal points: those that no other exceeds or equals in every field."""
    kept: list[Held] = []
    for point in points:
        if not any(_covers(other, point) for other in kept):
            kept = [other for other in kept if not _covers(point, other)] + [point]
    return tuple(kept)


def _covers(one: Held, other: Held) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


class Allocations(TorchDispatchMode):
    """Traces the storages that operations allocate, until they are freed.

    It also traces fake tensors, which take no memory. A kernel's internal workspace is not seen.

    Args:
        before: addresses of storages that existed before, such as weights.
        weights: shapes of weights.
        masks: shapes of attention masks.
        vocabulary: number of columns of logits.
        cast: the dtype of the weights' copies in the forward pass; None: there are none.
    """

    def __init__(
        self,
        before: AbstractSet[int],
        weights: AbstractSet[torch.Size],
        masks: AbstractSet[torch.Size],
        vocabulary: int,
        cast: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.before, self.weights, self.masks = before, weights, masks
        self.vocabulary, self.cast = vocabulary, cast
        self.turned = False
        """True during the backward pass."""
        self.scoring = False
        """True while logits are computed."""
        self.now = Held()
        self.host = 0
        """Bytes that wait in host memory."""
        self.unpacking = False
        """True while quantized weights are unpacked: what is allocated then are copies of weights.
        """
        self._most: tuple[Held, ...] = ()
        self._there: dict[int, tuple[int, str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for made in tree_leaves(returned):
            if isinstance(made, Tensor):
                self._note(made)
        return returned

    def begin(self) -> tuple[Held, ...]:
        """Begin a new part of the trace; returns the peaks of the part before."""
        before, self._most = self._most, (self.now,)
        return before

    def count_as(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor's storage as another kind: a field of :class:`Held`, or ``host``."""
        address = tensor.untyped_storage()._cdata
        if address in self._there:
            size, before, reference = self._there[address]
            self._there[address] = size, kind, reference
            self.add(-size, before)
            self.add(size, kind)

    def add(self, size: int, kind: str) -> None:
        """Add ``size`` bytes to a kind."""
        if kind == "host":
            self.host += size
            return
        self.now = self.now._replace(**{kind: getattr(self.now, kind) + size})
        if size > 0:
            self._most = largest((*self._most, self.now))

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # by its object: fake tensors have no data
        address = storage._cdata
        if address in self.before or address in self._there:
            return
        size, kind = storage.nbytes(), self._kind(tensor)
        self._there[address] = size, kind, ref(storage, partial(self._gone, address))
        self.add(size, kind)

    def _kind(self, tensor: Tensor) -> str:
        of_weight = tensor.shape in self.weights and (self.turned or tensor.dtype == self.cast)
        if self.unpacking or of_weight:
            return "copies"
        if tensor.shape in self.masks:
            return "masks"
        is_chunk = self.scoring and tensor.ndim == 2 and tensor.shape[1] == self.vocabulary
        return "logits" if is_chunk else "states"

    def _gone(self, address: int, _: Any) -> None:
        size, kind, _ = self._there.pop(address)
        self.add(-size, kind)
