"""The memory that training will take."""

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
"""Parts, or their beginnings, that are there between updates too."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, at the moment of an update when most are in use; per process.

    ``parts`` are on the device that computes, ``host`` in the host's memory beside it, and
    ``stays`` is there between updates, too. ``moment`` says when that is. ``advice`` says what
    makes weights and what is trained smaller, and what activations.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    advice: Advice = field(default_factory=lambda: Advice(LESS_STATE, LESS_ACTIVATIONS))
    stays: dict[str, int] = field(default_factory=dict)
    moment: str = ""

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
        when = f" ({self.moment})" if self.moment else ""
        yield f"{'together':<30}{in_units(self.total):>11}{when}"
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
    measure: Callable[[Policy, TensorDict, str, bool, bool], Activations] = measure_activations,
    passes: int = 2,
) -> MemoryPlan:
    """Estimate what an update has in memory, with ``pack`` the largest that it computes.

    It is the largest of several moments (:mod:`.moments`). At each of them there are

    - weights: the bytes of all parameters, but for those that are ``known`` to be in memory anyway;
      packed ones of their parts. ``others`` are further models, such as a reference.
    - master weights: with ``bf16-true`` float32 copies of what is trained.
    - optimizer: what one step leaves in its state (:func:`state_bytes`; AdamW: two tensors).
    - gradients: as many bytes as the trained parameters; of the first of an optimizer step's
      ``passes``, those that it has left so far. Of all these a process has one part in as many as
      share them.

    and at some

    - activations: what operations have made and not let go of, in the dtypes that compute. Followed
      on ``sample``, by default one group of the pack, and scaled by its tokens, for attention and
      everything else keep memory in proportion to them. Processes that compute a pack together
      share them (:func:`token_share`). Where matrices are split, all of this is of one
      process's parts, and followed on them; so are experts' activations, and the states that are
      sent to and fro, at an even load.
    - logits: chunks of fp32 logits (:mod:`lightning_rl.models.heads`).
    - copies of weights: autocast's, unpacked ones, and gradients before they are added to others.
    - gathered: of shared weights those outside of layers, and of one or two layers.
    - whole gradients, and gradients in a message: before they are shared out.
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
    """Of policies that learn one after another: one that does, beside what stays of the others."""
    most = max(plans, key=lambda plan: plan.total - sum(plan.stays.values()))
    parts, stays = Counter(most.parts), Counter(most.stays)
    for plan in plans:
        if plan is not most:
            parts.update(plan.stays)
            stays.update(plan.stays)
    return replace(most, parts=dict(parts), stays=dict(stays))
