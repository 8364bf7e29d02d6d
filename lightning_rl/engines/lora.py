"""Engines of one LoRA policy: adapters merged into their base, or both apart as they are trained.

A merged weight is rounded to the engine's dtype as a whole. In 16 bits that rounds away most of a
small update, so the engine samples from other weights than are trained. Apart, base and factors are
rounded as the trainer rounds them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from lightning_rl.engines.base import Engine
from lightning_rl.errors import ConfigError, IncompleteWeightsError, WeightSyncError
from lightning_rl.run import dist

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
                    f"the push left out {layer + end!r}, the other half of an adapter"
                )


def require_adapters(
    adapters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], engine: str = "the engine"
) -> None:
    """Check the factors of a push before an engine changes anything.

    Args:
        adapters: factors by name.
        shapes: of the base's weights.
        engine: its name.

    Raises:
        IncompleteWeightsError: naming a factor that is of no weight of the base, does not fit it,
            or came without its other half.
    """
    for layer in layers_of(adapters):
        if f"{layer}.weight" not in shapes:
            raise IncompleteWeightsError(
                f"the push brings an adapter of {layer!r}, of which {engine} has no weight; is its "
                "model the trainer's?"
            )
    require_pairs(adapters)
    for layer in layers_of(adapters):
        shape = tuple(shapes[f"{layer}.weight"])
        a, b = (adapters[f"{layer}{end}"] for end in _ENDS)
        if (b.shape[0], a.shape[-1]) != shape or b.shape[1] != len(a):
            raise IncompleteWeightsError(
                f"the push brings an adapter of {layer!r} of shapes {tuple(b.shape)} and "
                f"{tuple(a.shape)}, {engine}'s weight is {shape}; is its model the trainer's?"
            )


class LoRAEngine(Engine):
    """An engine that can compute with a LoRA beside its base."""

    adapters: str | None = None
    """The constructor's argument: ``apart``, ``merged``; None: apart where it computes in 16 bits
    or less, if it can."""
    lora_rank: int | None = None
    """The largest rank of adapters that are kept apart; None: weights come whole."""
    has_base = False
    """True once a push has brought the base of adapters."""

    def choose_adapters(self, adapters: str | None) -> None:
        """Keep what a constructor was given; raises a ConfigError for another word."""
        if adapters not in (None, APART, MERGED):
            raise ConfigError(f"engine adapters={adapters!r} must be apart, merged or null")
        self.adapters = adapters

    def follow_lora(self, rank: int | None, obstacle: Callable[[], str | None]) -> None:
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
                "%s merges the LoRA and rounds the sum to %s, so what it samples from lacks small "
                "updates: %s. To say that this is meant, set engine adapters: merged",
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
        """Adapters of a push, and the base that it brings, if it does.

        Raises:
            WeightSyncError: if there is none, and none comes.
        """
        adapters, base = divide(weights)
        if not self.has_base and base is None:
            raise WeightSyncError(
                f"{type(self).__name__} has no base yet, and the push brings adapters alone; send "
                "their base after them (lacks_base says when)"
            )
        return adapters, base


def lora_hint(told: str) -> str:
    """Return vLLM's error at start, with a hint if it does not support LoRA for the model."""
    lacks = "does not support LoRA" in told
    return f"{told} (set engine adapters: merged)" if lacks else told
