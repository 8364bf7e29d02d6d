"""An estimate of the memory that training will take."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.cli.check.activations import Activations, measure_activations
from lightning_rl.cli.check.advice import LESS_ACTIVATIONS, LESS_STATE, Advice, next_advice
from lightning_rl.cli.check.allocations import Held
from lightning_rl.cli.check.moments import Alone, Residence, Sharded, Sizes, size_of
from lightning_rl.cli.check.parts import one_part, parts_of
from lightning_rl.cli.check.placement import Placement
from lightning_rl.cli.check.token_shares import token_share
from lightning_rl.data.batch import select
from lightning_rl.learn.optimizer_state import state_bytes, step_bytes
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy

STAYS = ("weights", "other models", "gradients", "optimizer", "master weights")
"""Parts, or prefixes of their names, that stay allocated between updates."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, per process, at the moment of an update when usage peaks.

    ``parts`` are on the device that computes, ``host`` in the host's memory, and ``stays`` remains
    between updates, too. ``moment`` names the moment of the peak. ``advice`` suggests how to lower
    the memory of weights and training state, and that of activations.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    advice: Advice = field(default_factory=lambda: Advice(LESS_STATE, LESS_ACTIVATIONS))
    stays: dict[str, int] = field(default_factory=dict)
    moment: str = ""

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return sum(self.parts.values())

    def sum_of(self, *names: str) -> int:
        """Return the bytes of the parts whose names begin with one of ``names``, on the device."""
        return sum(size for part, size in self.parts.items() if part.startswith(names))

    def lines(self) -> Iterator[str]:
        """Yield lines of text for the user."""
        for name, size in self.parts.items():
            yield f"{name:<30}{in_units(size):>11}"
        when = f" ({self.moment})" if self.moment else ""
        yield f"{'together':<30}{in_units(self.total):>11}{when}"
        for name, size in self.host.items():
            yield f"{name + ', in host memory':<41}{in_units(size):>11}"


def in_units(size: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def training_memory(
    policy: Policy,
    others: Sequence[nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    pack: TensorDict,
    placement: Placement | None = None,
    known: AbstractSet[nn.Parameter] = frozenset(),
    sample: TensorDict | None = None,
    measure: Callable[[Policy, TensorDict, str, bool, bool], Activations] = measure_activations,
    passes: int = 2,
) -> MemoryPlan:
    """Estimate the peak memory of an update, with ``pack`` the largest that it computes.

    It is the largest of several moments (:mod:`.moments`). Each of them includes

    - weights: the bytes of all parameters, except those ``known`` to be in memory anyway; for
      packed ones, of their parts. ``others`` are further models, such as a reference.
    - master weights: with ``bf16-true``, float32 copies of the trained parameters.
    - optimizer: the state after one step (:func:`state_bytes`; AdamW: two tensors).
    - gradients: as many bytes as the trained parameters; in the first of an optimizer step's
      ``passes``, only those computed so far. All of these are divided by the number of processes
      that shard them.

    and some of them include

    - activations: allocated by operations and not yet freed, in the dtypes that compute. They are
      traced on ``sample``, by default one group of the pack, and scaled by its tokens, since
      attention and everything else take memory in proportion to them. Processes that compute a pack
      together divide them (:func:`token_share`). With tensor parallelism, they are traced on one
      process's part; so are experts' activations, and the states that are exchanged, at an even
      load.
    - logits: chunks of fp32 logits (:mod:`lightning_rl.models.heads`).
    - copies of weights: autocast's, unpacked ones, and gradients before they are accumulated.
    - gathered: sharded weights that are gathered: those outside of layers, and of one or two
      layers.
    - whole gradients, and gradients in a message: before they are reduced and sharded.
    """
    placement = placement or Placement()
    if placement.tensor > 1:
        whole, policy = policy, one_part(policy, placement.tensor)
        known = parts_of(known, whole, policy)
        others = [one_part(other, placement.tensor) for other in others]
    computes = policy if placement.expert == 1 else one_part(policy, expert=placement.expert)
    true, mixed = (placement.precision == name for name in ("bf16-true", "bf16-mixed"))
    width, computed = 2 if true else 4, 2 if true or mixed else 4
    trained = [p for p in policy.parameters() if p.requires_grad]
    group = pack["rollouts", "group"]
    if sample is None:
        sample = select(pack, (group == group[0]).nonzero().squeeze(1))
    tokens, ranks = forward_tokens(pack, policy.filling), placement.sequence
    tile = None if policy.recompute is None else policy.recompute.mlp_tokens
    tiled = tile is not None and tile < tokens // ranks
    # FSDP2 copies even what one process has whole.
    gathers = placement.shards * placement.tensor > 1
    found = measure(computes, sample, placement.precision, tiled, gathers)
    stepped = torch.bfloat16 if true and not placement.masters else torch.float32
    name, size = state_bytes(optimizer, (p.shape for p in trained), stepped)
    alone = placement.device.type == "cuda" and not gathers
    stepping = step_bytes(optimizer, (p.numel() for p in trained), stepped.itemsize, alone)
    state = {
        "weights": size_of((p for p in policy.parameters() if p not in known), width),
        "other models": sum(size_of(module.parameters(), width) for module in others),
        "gradients": size_of(trained, width),
        f"optimizer ({name})": size,
    }
    if true and placement.masters:
        state["master weights"] = size_of(trained, 4)
    state = {name: ceil(size / placement.shards) for name, size in state.items()}

    own = token_share(policy, pack, ranks, computed)

    def held(part: str, bytes_of: Callable[[Held], float]) -> Held:
        share = 1.0 if tile is None else min(1.0, tile * ranks / tokens)
        return own.of(found.at(part, tokens, chunk, share, lambda held: bytes_of(own.of(held))))

    head = policy.lm.get_output_embeddings().weight
    loss_tokens = ceil(int(pack["tokens", "loss_mask"].sum()) / ranks)
    chunk = 4 * min(chunk_elements(placement.device), loss_tokens * head.shape[0])
    sizes = Sizes(
        f"activations of {tokens // ranks:,} tokens",
        held,
        0 if placement.cpu_offload else state["gradients"],
        ceil(stepping / placement.shards),
        passes > 1,
    )
    residence: Residence = Alone()
    if gathers:
        residence = Sharded.of(computes, computed, placement.shards, placement.expert)
    moment = max(residence.moments(sizes), key=lambda moment: moment.total)
    then = {name: size for name, size in moment.parts.items() if size and name != "gradients"}
    host = {"layers' inputs": ceil(sent / ranks)} if (sent := found.on_host(tokens)) else {}
    advice = next_advice(policy, found, size > 3 * sum(p.numel() for p in trained), placement)
    if placement.cpu_offload:
        return MemoryPlan(then, state | host, advice, {}, moment.name)
    there = state | {"gradients": moment.parts["gradients"]}
    return MemoryPlan(there | then, host, advice, state, moment.name)


def together(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Combine policies that learn in turn: the peak of one, and what stays of the others."""
    most = max(plans, key=lambda plan: plan.total - sum(plan.stays.values()))
    parts, stays = Counter(most.parts), Counter(most.stays)
    for plan in plans:
        if plan is not most:
            parts.update(plan.stays)
            stays.update(plan.stays)
    return replace(most, parts=dict(parts), stays=dict(stays))
