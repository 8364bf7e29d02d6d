"""FSDP2: what a process gathers of sharded weights, and what it has of their gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_rl.models.parallel.expert import hosts_in
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of

HEAD, HEAD_BACKWARD = "the head computes logits", "the head's backward pass"
LAYER, LAYER_BACKWARD = "a layer computes", "a layer's backward pass"
REDUCED, STEP = "gradients are summed over processes", "the optimizer's step"
"""Moments of an update at which memory may peak."""

GATHERED, MESSAGE = "gathered", "gradients in a message"


class Group(NamedTuple):
    """Weights that FSDP2 gathers together from ``ranks`` processes.

    ``weights`` are their bytes as they are computed with, and ``gradients`` those of their
    gradients, in the float32 in which they are reduced.
    """

    weights: int
    gradients: int
    ranks: int

    @property
    def message(self) -> int:
        """Bytes of an all-gather's buffer, from which weights are copied; 0 for one process."""
        return self.weights if self.ranks > 1 else 0


@dataclass(frozen=True)
class Gathering:
    """A process has a shard of each weight, and gathers a layer's weights to compute with them.

    Weights ``outside`` of layers are gathered from the forward pass to the end of the backward
    pass, and their gradients are unsharded until then. ``layer`` is the largest layer, gathered by
    itself, and so are its ``experts`` with expert parallelism. In the forward pass the buffer of an
    all-gather stays until the next one's has arrived; in the backward pass the preceding layer is
    prefetched, and its buffer waits. A layer's gradients are unsharded until all are computed. Then
    they are copied into one buffer to be reduced, which stays until the next layer's.
    """

    outside: Group
    layer: Group
    experts: Group
    shards: int

    @classmethod
    def of(cls, policy: Policy, width: int, shards: int, expert: int) -> "Gathering":
        """Return the sizes of a process's shard of a policy that computes in ``width`` bytes per
        number.
        """
        stacks = [set(stack.parameters()) for stack in hosts_in(policy)]
        apart = set().union(*stacks)
        layers = [set(layer.parameters()) - apart for layer in layers_of(policy)]
        outside = set(policy.parameters()).difference(*layers, apart)

        def group(parts: Iterable[set[nn.Parameter]], ranks: int) -> Group:
            sizes = [(size_of(part, width), size_of(part, 4, trained_only=True)) for part in parts]
            return Group(*max(sizes, default=(0, 0)), ranks)

        return cls(
            group([outside], shards),
            group(layers, shards),
            group(stacks, shards // expert),
            shards,
        )

    def held(self, moment: str, further: bool) -> dict[str, float]:
        """Return the bytes that are gathered, and those of gradients on their way, at a moment.

        ``further``: the backward pass of a layer is not the first.
        """
        last = self.experts if self.experts.weights else self.layer
        layer, ahead = self.layer.weights + self.experts.weights, self.layer.message
        gathered = {
            LAYER: layer + last.message,
            HEAD: last.message,
            HEAD_BACKWARD: ahead,
            LAYER_BACKWARD: layer + ahead,
            REDUCED: ahead,
        }
        summed = moment == REDUCED or (moment == LAYER_BACKWARD and further)
        return {
            GATHERED: self.outside.weights + gathered[moment],
            MESSAGE: self.layer.gradients if summed else 0,
        }


def size_of(parameters: Iterable[nn.Parameter], width: int, trained_only: bool = False) -> int:
    """Return the bytes of parameters, with ``width`` bytes per floating-point number."""
    return sum(
        p.numel() * (width if p.is_floating_point() else p.element_size())
        for p in parameters
        if p.requires_grad or not trained_only
    )
