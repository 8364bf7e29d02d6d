"""The memory that training will take."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.cli.check.activations import (
    Activations,
    measure_activations,
    shared_activations,
)
from lightning_rl.cli.check.advice import LESS_ACTIVATIONS, LESS_STATE, Advice, next_advice
from lightning_rl.cli.check.optimizer_state import state_bytes
from lightning_rl.cli.check.parts import one_part, parts_of
from lightning_rl.cli.check.placement import Placement
from lightning_rl.data.batch import select
from lightning_rl.models.expert import hosts_in
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import quantized_layers
from lightning_rl.models.recompute import layers_of, tiled_mlps

STAYS = ("weights", "other models", "gradients", "optimizer", "master weights")
"""Parts, or their beginnings, that are there between updates too."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, at the moment of an update when most are in use; per process.

    ``parts`` are on the device that computes, ``host`` in the host's memory beside it. ``advice``
    says what makes weights and what is trained smaller, and what activations.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    advice: Advice = field(default_factory=lambda: Advice(LESS_STATE, LESS_ACTIVATIONS))

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.parts.values())

    def sum_of(self, *names: str) -> int:
        """Add up the parts whose names begin so, on the device."""
        return sum(size for part, size in self.parts.items() if part.startswith(names))

    def lines(self) -> Iterator[str]:
        """Yield lines for a person."""
        for name, size in self.parts.items():
            yield f"{name:<30}{in_units(size):>11}"
        yield f"{'together':<30}{in_units(self.total):>11}"
        for name, size in self.host.items():
            yield f"{name + ', in host memory':<41}{in_units(size):>11}"


def in_units(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def training_memory(
    policy: Policy,
    others: Sequence[nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    pack: TensorDict,
    placement: Placement | None = None,
    known: AbstractSet[nn.Parameter] = frozenset(),
    sample: TensorDict | None = None,
    measure: Callable[[Policy, TensorDict, str, bool], Activations] = measure_activations,
) -> MemoryPlan:
    """Estimate what an update keeps in memory, with ``pack`` the largest that it computes.

    - weights: the bytes of all parameters, but for those that are ``known`` to be in memory anyway;
      packed ones of their parts. ``others`` are further models, such as a reference.
    - gradients: as many bytes as the trained parameters.
    - master weights: with ``bf16-true`` float32 copies of what is trained.
    - optimizer: what one step leaves in its state (:func:`state_bytes`; AdamW: two tensors).
      Of all these a process has one part in as many as share them.
    - gathered: of shared weights those outside of layers, and two layers (FSDP2 gathers one ahead);
      their gradients, of one layer, until they are summed. Of experts that processes have together
      one layer's part, which is gathered by itself.
    - activations: what autograd keeps for the backward pass, in the dtypes that compute. Measured
      on ``sample``, by default one group of the pack, and scaled by its tokens, for attention and
      everything else keep memory in proportion to them. With gradient checkpointing one layer's
      come on top, of an MLP in tiles only those of a tile; layers' inputs that wait in host memory
      are there, and one more than is computed with is on the device. Processes that compute a
      pack together share them (:func:`shared_activations`). Where matrices are split, all of this
      is of one process's parts, and measured on them; so are experts' activations, and the states
      that are sent to and fro, at an even load.
    - bfloat16 weights: autocast's copies of whole weights, which autograd keeps as well.
    - logits: two chunks of fp32 logits (:mod:`lightning_rl.models.heads` never holds more).
    - backward: the gradient of the largest parameter, before it is added to the others; and those
      of an MLP in tiles, until they are of all tokens.
    - an unpacked layer: the largest weight that is kept in few bits, while it is multiplied.
    """
    placement = placement or Placement()
    if placement.tensor > 1:
        whole, policy = policy, one_part(policy, placement.tensor)
        known = parts_of(known, whole, policy)
        others = [one_part(other, placement.tensor) for other in others]
    computes = policy if placement.expert == 1 else one_part(policy, expert=placement.expert)
    true, mixed = (placement.precision == name for name in ("bf16-true", "bf16-mixed"))
    width = 2 if true else 4
    trained = [p for p in policy.parameters() if p.requires_grad]
    head = policy.lm.get_output_embeddings().weight
    group = pack["rollouts", "group"]
    if sample is None:
        sample = select(pack, (group == group[0]).nonzero().squeeze(1))
    tokens, ranks = forward_tokens(pack), placement.sequence
    tile = None if policy.recompute is None else policy.recompute.mlp_tokens
    tiled = tile is not None and tile < tokens // ranks
    found = measure(computes, sample, placement.precision, tiled)
    kept = found.at_once(tokens, None if tile is None else tile * ranks)
    loss_tokens = ceil(int(pack["tokens", "loss_mask"].sum()) / placement.sequence)
    stepped = torch.bfloat16 if true and not placement.masters else torch.float32
    name, size = state_bytes(optimizer, (p.shape for p in trained), stepped)
    state = {
        "weights": _size((p for p in policy.parameters() if p not in known), width),
        "other models": sum(_size(module.parameters(), width) for module in others),
        "gradients": _size(trained, width),
        f"optimizer ({name})": size,
    }
    if true and placement.masters:
        state["master weights"] = _size(trained, 4)
    state = {name: ceil(size / placement.shards) for name, size in state.items()}
    parts = {
        f"activations of {tokens // placement.sequence:,} tokens": shared_activations(
            policy, kept, pack, ranks, 2 if true or mixed else 4
        ),
        "logits": 2 * 4 * min(chunk_elements(placement.device), loss_tokens * head.shape[0]),
        "backward": width * max(p.numel() for p in computes.parameters() if p.requires_grad),
    }
    if packed := [m.in_features * m.out_features for m in quantized_layers(policy).values()]:
        parts["an unpacked layer"] = (2 if true or mixed else 4) * max(packed)
    if placement.shards * placement.tensor > 1:  # FSDP2 copies even what one process has whole
        parts["gathered"] = _gathered(computes, 2 if true or mixed else 4)
    elif tiled:  # else among what is gathered
        parts["backward"] += max(_size(mlp.parameters(), width, True) for mlp in tiled_mlps(policy))
    if mixed and "gathered" not in parts:
        parts["bfloat16 weights"] = found.copies + 2 * head.numel()
    host = {"layers' inputs": ceil(sent / ranks)} if (sent := found.on_host(tokens)) else {}
    advice = next_advice(policy, found, size > 3 * sum(p.numel() for p in trained), placement)
    if placement.cpu_offload:
        return MemoryPlan(parts, state | host, advice)
    return MemoryPlan(state | parts, host, advice)


def together(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Of policies that learn one after another: what stays of all, and the largest rest of one."""
    stays: Counter[str] = Counter()
    for plan in plans:
        stays.update({name: size for name, size in plan.parts.items() if name.startswith(STAYS)})
    most = max(plans, key=lambda plan: plan.total - plan.sum_of(*STAYS))
    rest = {name: size for name, size in most.parts.items() if not name.startswith(STAYS)}
    return MemoryPlan(dict(stays) | rest, most.host, most.advice)


def _gathered(policy: Policy, width: int) -> int:
    """Bytes of the weights that a process has whole at a time, and of their gradients."""
    experts = [set(stack.parameters()) for stack in hosts_in(policy)]
    apart = set().union(*experts)
    layers = [set(layer.parameters()) - apart for layer in layers_of(policy)]
    outside = set(policy.parameters()).difference(*layers, apart)

    def largest(parts: list[set[nn.Parameter]], trained_only: bool) -> int:
        return max((_size(part, width, trained_only) for part in parts), default=0)

    weights = _size(outside, width) + 2 * largest(layers, False) + largest(experts, False)
    gradients = _size(outside, width, True) + largest(layers, True) + largest(experts, True)
    return weights + gradients


def _size(parameters: Iterable[nn.Parameter], width: int, trained_only: bool = False) -> int:
    """Bytes, where a float takes ``width``."""
    return sum(
        p.numel() * (width if p.is_floating_point() else p.element_size())
        for p in parameters
        if p.requires_grad or not trained_only
    )
