"""LoRAEngine: adapters of a single LoRA policy, merged into their base or kept unmerged.

A merged weight is rounded to the engine's dtype as a whole. In 16 bits this rounds away most of a
small update, so the engine samples from other weights than are trained. Unmerged, base and factors
are rounded as the trainer rounds them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.errors import ConfigError, IncompleteWeightsError, WeightSyncError
from lightning_rl.run.processes import dist

_log = logging.getLogger(__name__)

APART, MERGED = "apart", "merged"
_ENDS = (".lora_A", ".lora_B")


def is_adapter(name: str) -> bool:
    """Tell whether a tensor is an adapter's factor (:meth:`Policy.named_adapter_weights`)."""
    return name.endswith(_ENDS)


def divide(
    weights: Iterable[tuple[str, Tensor]],
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]] | None]:
    """Split a push into adapters, which come first, and the remaining weights; None: no others."""
    stream, adapters = iter(weights), dict[str, Tensor]()
    for name, tensor in stream:
        if not is_adapter(name):
            return adapters, chain([(name, tensor)], stream)
        adapters[name] = tensor
    return adapters, None if adapters else iter(())


def layers_of(adapters: Iterable[str]) -> list[str]:
    """Return the layers adapted by factors with these names."""
    return sorted({name.rpartition(".")[0] for name in adapters})


def require_pairs(adapters: Mapping[str, Tensor]) -> None:
    """Check that factors come in pairs.

    Raises:
        IncompleteWeightsError: naming one that is missing.
    """
    for layer in layers_of(adapters):
        for end in _ENDS:
            if f"{layer}{end}" not in adapters:
                raise IncompleteWeightsError(
                    f"the push lacks {layer + end!r}, the other half of an adapter"
                )


def require_adapters(
    adapters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], engine: str = "the engine"
) -> None:
    """Check the factors of a push before an engine changes anything.

    Args:
        adapters: factors by name.
        shapes: shapes of the base's weights, by name.
        engine: name of the engine, for messages.

    Raises:
        IncompleteWeightsError: naming a factor whose layer the base lacks, that does not fit the
            layer, or whose other half is missing.
    """
    for layer in layers_of(adapters):
        if f"{layer}.weight" not in shapes:
            raise IncompleteWeightsError(
                f"the push contains an adapter of {layer!r}, but {engine} has no such weight; is "
                "its model the trainer's?"
            )
    require_pairs(adapters)
    for layer in layers_of(adapters):
        shape = tuple(shapes[f"{layer}.weight"])
        a, b = (adapters[f"{layer}{end}"] for end in _ENDS)
        if (b.shape[0], a.shape[-1]) != shape or b.shape[1] != len(a):
            raise IncompleteWeightsError(
                f"the push contains an adapter of {layer!r} with shapes {tuple(b.shape)} and "
                f"{tuple(a.shape)}, but {engine}'s weight is {shape}; is its model the trainer's?"
            )


class LoRAEngine(Engine):
    """An engine that can compute with a LoRA beside its base."""

    adapters: str | None = None
    """The constructor's argument: ``apart`` (unmerged) or ``merged``; None: ``apart`` if it
    computes in 16 bits or less and supports it.
    """
    lora_rank: int | None = None
    """The largest rank of adapters that are kept unmerged; None: pushes contain whole weights."""
    has_base = False
    """True once a push has contained the base of adapters."""

    def choose_adapters(self, adapters: str | None) -> None:
        """Store the constructor's argument; raise a ConfigError for any other value."""
        if adapters not in (None, APART, MERGED):
            raise ConfigError(f"engine adapters={adapters!r} must be 'apart', 'merged' or null")
        self.adapters = adapters

    def configure_lora(self, rank: int | None, obstacle: Callable[[], str | None]) -> None:
        if self.running:
            return
        self.lora_rank = None
        rounds = self.precision != "float32"
        if rank is None or not (self.adapters == APART or (self.adapters is None and rounds)):
            return
        why = self.must_merge(rank) or obstacle()
        if why is None:
            self.lora_rank = rank
        elif self.adapters == APART:
            raise ConfigError(f"engine adapters='apart': {why}; set adapters: merged")
        elif dist.rank() == 0:
            _log.warning(
                "%s merges the LoRA and rounds the sum to %s, so the weights that it samples from "
                "lack small updates: %s. Set engine adapters: merged to confirm that this is "
                "intended",
                type(self).__name__,
                self.precision,
                why,
            )

    def must_merge(self, rank: int) -> str | None:
        """Return why this engine cannot keep adapters of this rank unmerged; None if it can."""
        return None

    @property
    def takes_adapters(self) -> bool:
        return self.lora_rank is not None

    @property
    def lacks_base(self) -> bool:
        return self.takes_adapters and not self.has_base

    def divided(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]] | None]:
        """Return the adapters of a push, and the base that it contains; None if it contains none.

        Raises:
            WeightSyncError: if there is no base yet, and the push contains none.
        """
        adapters, base = divide(weights)
        if not self.has_base and base is None:
            raise WeightSyncError(
                f"{type(self).__name__} has no base yet, but the push contains adapters alone; "
                "send their base after them (lacks_base says when)"
            )
        return adapters, base
