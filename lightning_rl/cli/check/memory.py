"""An estimate of the memory that training will take."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_rl.cli.check.advice import LESS_ACTIVATIONS, LESS_STATE, Advice, next_advice
from lightning_rl.cli.check.fake_models import changed, copy_of, shapes_of_experts
from lightning_rl.cli.check.gathering import (
    GATHERED,
    MESSAGE,
    REDUCED,
    STEP,
    Gathering,
    size_of,
)
from lightning_rl.cli.check.placement import Placement
from lightning_rl.cli.check.tracking import (
    COPIES,
    GRADIENTS,
    LOGITS,
    STATES,
    Moment,
    Tracker,
    follow,
)
from lightning_rl.learn.optimizer_state import state_bytes, step_bytes
from lightning_rl.models import heads
from lightning_rl.models.attention.packed import build_layout
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.parallel.queries import most_keys
from lightning_rl.models.parallel.sharing import head_counts, head_ranks
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of, tiled_mlps

OWN = "optimizer's own"
REWARDS = "other models, of rewards"

NEED_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""Errors that fake tensors raise in operations whose shapes depend on values, such as vision's."""

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
    micro_batch: TensorDict,
    placement: Placement | None = None,
    known: AbstractSet[nn.Parameter] = frozenset(),
    bonus: bool = False,
    passes: int = 2,
) -> MemoryPlan:
    """Estimate the peak memory of an update, with ``micro_batch`` the largest that it computes.

    It is the largest of several moments (:mod:`.gathering`). Each of them includes

    - weights: the bytes of all parameters, except those ``known`` to be in memory anyway; for
      packed ones, of their parts. ``others`` are further models, such as a reference.
    - master weights: with ``bf16-true``, float32 copies of the trained parameters.
    - optimizer: the state after one step (:func:`state_bytes`; AdamW: two tensors).
    - gradients: as many bytes as the trained parameters; in the first of an optimizer step's
      ``passes``, only those computed so far. All of these are divided by the number of processes
      that shard them.

    and some of them what a pass over the micro-batch allocates, which is followed with fake tensors
    (:func:`.tracking.follow`), of a loss that has an entropy term with ``bonus``:

    - activations, in the dtypes that compute. Processes that compute a micro-batch together divide
      them, but for keys (:mod:`.keys`). With tensor parallelism they are those of one process's
      part; so are experts' activations, and the states that are exchanged, at an even load.
    - logits: chunks of fp32 logits (:mod:`lightning_rl.models.heads`).
    - copies of weights: autocast's, unpacked ones, and gradients before they are accumulated.
    - gathered: sharded weights that are gathered: those outside of layers, and of one or two
      layers.
    - whole gradients, and gradients in a message: before they are reduced and sharded.
    """
    placement = placement or Placement()
    if placement.tensor > 1:
        whole, policy = policy, copy_of(policy, placement.tensor)
        pairs = zip(whole.parameters(), policy.parameters(), strict=True)
        known = {own for parameter, own in pairs if parameter in known}
        others = [copy_of(other, placement.tensor) for other in others]
    true, mixed = (placement.precision == name for name in ("bf16-true", "bf16-mixed"))
    width, computed = 2 if true else 4, 2 if true or mixed else 4
    trained = [p for p in policy.parameters() if p.requires_grad]
    # FSDP2 copies even what one process has whole.
    gathers = placement.shards * placement.tensor > 1
    stepped = torch.bfloat16 if true and not placement.masters else torch.float32
    name, size = state_bytes(optimizer, (p.shape for p in trained), stepped)
    state = {
        "weights": size_of((p for p in policy.parameters() if p not in known), width),
        "other models": sum(size_of(module.parameters(), width) for module in others),
        GRADIENTS: size_of(trained, width),
        f"optimizer ({name})": size,
    }
    if true and placement.masters:
        state["master weights"] = size_of(trained, 4)
    state = {name: ceil(size / placement.shards) for name, size in state.items()}
    gradients = 0 if placement.cpu_offload else state[GRADIENTS]

    gathering = None
    if gathers:
        computes = policy if placement.expert == 1 else copy_of(policy, expert=placement.expert)
        gathering = Gathering.of(computes, computed, placement.shards, placement.expert)
    before = {STATES: bytes_of_all_keys(policy, micro_batch, placement.sequence, computed)}
    if passes > 1 or placement.cpu_offload:
        before[GRADIENTS] = gradients
    found = _followed(policy, micro_batch, placement, gathering, bonus, before)
    alone = placement.device.type == "cuda" and not gathers
    stepping = step_bytes(optimizer, (p.numel() for p in trained), stepped.itemsize, alone)
    ends = {GRADIENTS: gradients, OWN: ceil(stepping / placement.shards)}
    moments = [found.peak, Moment(STEP, ends)]
    if gathering is not None:
        outside = gathering.outside.gradients
        summed = {GRADIENTS: gradients, COPIES: outside, MESSAGE: outside}
        moments.append(Moment(REDUCED, summed))
    moment = max(moments, key=lambda moment: moment.total)
    tokens = forward_tokens(micro_batch, policy.filling) // placement.sequence
    names = {
        STATES: f"activations of {tokens:,} tokens",
        LOGITS: LOGITS,
        GATHERED: GATHERED,
        COPIES: "whole gradients" if gathers else COPIES,
        MESSAGE: MESSAGE,
        OWN: OWN,
    }
    sizes = {kind: ceil(size) for kind, size in moment.parts.items()}
    then = {called: sizes[kind] for kind, called in names.items() if sizes.get(kind)}
    host = {"layers' inputs": ceil(found.sent / placement.sequence)} if found.sent else {}
    wide = size > 3 * sum(p.numel() for p in trained)
    advice = next_advice(policy, moment.parts.get(STATES, 0), found.kept, wide, placement)
    if placement.cpu_offload:
        return MemoryPlan(then, state | host, advice, {}, moment.name)
    there = state | {GRADIENTS: sizes.get(GRADIENTS, 0)}
    return MemoryPlan(there | then, host, advice, state, moment.name)


def _followed(
    policy: Policy,
    micro_batch: TensorDict,
    placement: Placement,
    gathering: Gathering | None,
    bonus: bool,
    before: Mapping[str, float],
) -> Tracker:
    """Follow what a process of a placement computes for a micro-batch, on a copied policy."""
    true, mixed = (placement.precision == name for name in ("bf16-true", "bf16-mixed"))
    # FSDP2 gathers weights in 16 bits if it computes in these.
    weights = torch.bfloat16 if true or (mixed and gathering is not None) else None
    buffers = torch.bfloat16 if true else None
    elements, ranks = chunk_elements(placement.device), placement.sequence
    live = int(micro_batch["tokens", "loss_mask"].sum())

    def follow_copy(fake: bool) -> Tracker:
        computes = copy_of(policy, 1, placement.expert, fake, weights, buffers)
        computes.compiled = False
        for mlp in tiled_mlps(computes):
            tiled: Any = mlp.forward
            tiled.tokens *= ranks  # each of them computes so many of its own
        vocabulary = computes.lm.get_output_embeddings().weight.shape[0]
        own, all_ = (min(elements, n * vocabulary) for n in (ceil(live / ranks), live))
        shares = {STATES: 1 / ranks, LOGITS: own / all_}
        return follow(
            computes, micro_batch.to(computes.lm.device), mixed, bonus, shares, gathering, before
        )

    with changed(heads, chunk_elements=lambda _: elements):
        try:
            with shapes_of_experts():
                return follow_copy(fake=True)
        except NEED_VALUES:
            return follow_copy(fake=False)


def together(
    plans: Sequence[MemoryPlan],
    models: Sequence[tuple[torch.device | None, int]],
    device: torch.device,
) -> MemoryPlan:
    """Combine policies that learn in turn: the peak of one, and what stays of the others.

    Rewards' ``models`` stay, too: each is on its device, None: on the ``device`` that trains. Those
    on another GPU take none of this one.
    """
    most = max(plans, key=lambda plan: plan.total - sum(plan.stays.values()))
    parts, stays, host = Counter(most.parts), Counter(most.stays), Counter(most.host)
    for plan in plans:
        if plan is not most:
            parts.update(plan.stays)
            stays.update(plan.stays)
    for where, size in models:
        if where is None or (where.type == device.type and not where.index):
            parts[REWARDS] += size
            stays[REWARDS] += size
        elif where.type == "cpu":
            host[REWARDS] += size
    return replace(most, parts=dict(parts), stays=dict(stays), host=dict(host))


def bytes_of_all_keys(policy: Policy, micro_batch: TensorDict, ranks: int, width: int) -> float:
    """Return the bytes that each of ``ranks`` ranks that compute a micro-batch together has in
    addition to its share.

    If they split queries, a layer keeps the keys and values of all tokens that its kernel reads
    (with gradient checkpointing, those of one layer). ``width``: bytes per number.
    """
    if ranks == 1:
        return 0.0
    text, layers = policy.lm.config.get_text_config(), layers_of(policy)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keeping = sum(not layer.gradient_checkpointing for layer in layers) or 1
    heads = head_counts(text, 1 if policy.tensor is None else policy.tensor.size)
    together = head_ranks(ranks, *heads)
    places = ranks // together
    segments = build_layout(micro_batch).segments
    seen = most_keys(segments, places) - most_keys(segments, 1) / places
    # What is measured has keys once for each query head.
    extra: float = keeping * width * 2 * seen * heads[0] // together * size
    return extra
