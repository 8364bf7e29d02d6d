"""The algebra of a configuration's batches, and the memory that training will take."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.cli.activations import Activations, measure_activations, shared_activations
from lightning_rl.cli.optimizer_state import state_bytes
from lightning_rl.cli.plan_parts import one_part, parts_of
from lightning_rl.data.batch import select
from lightning_rl.data.splitting import split_minibatches, split_packs
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule
from lightning_rl.models.expert import hosts_in
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import quantized_layers
from lightning_rl.models.recompute import layers_of, tiled_mlps
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus


@dataclass(frozen=True)
class BatchPlan:
    """From prompts to optimizer steps. Tokens and packs are the most that there can be.

    ``pack_tokens`` are the forward tokens of the largest pack, on each of ``ranks`` processes, and
    ``packs`` how many a minibatch is cut into there; a prompt that rollouts share counts once. It
    learns in the iterations of its ``schedule``.
    """

    prompts: int
    groups: int  # per iteration, on all ranks
    group_size: int
    ranks: int
    tokens: int
    minibatches: int
    ppo_epochs: int
    packs: int
    pack_tokens: int
    iterations_per_epoch: int
    epochs: int | None
    schedule: UpdateSchedule = EveryIteration()

    @property
    def rollouts(self) -> int:
        """Per iteration, on all ranks."""
        return self.groups * self.group_size

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration."""
        return self.ppo_epochs * self.minibatches

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None if ``max_epochs`` does not bound it."""
        return None if self.epochs is None else self.updates(self.epochs) * self.steps

    def updates(self, epochs: int) -> int:
        """Iterations of the first so many epochs in which it learns."""
        return self.schedule.count(epochs * self.iterations_per_epoch)

    def lines(self) -> Iterator[str]:
        """Yield lines for a person."""
        yield (
            f"{self.groups} prompts x group_size {self.group_size} = {self.rollouts} rollouts "
            f"per iteration, at most {self.tokens:,} tokens"
        )
        ranks = f"on each of {self.ranks} ranks " if self.ranks > 1 else ""
        size = largest_share(self.groups, self.ranks, self.minibatches)
        yield (
            f"{ranks}{_count(self.minibatches, 'minibatch')} of {size} groups or fewer, in "
            f"{_count(self.packs, 'pack')} of {self.pack_tokens:,} tokens or fewer each"
        )
        yield (
            f"ppo_epochs {self.ppo_epochs} x minibatches {self.minibatches} = {self.steps} "
            f"optimizer steps per iteration, {self.steps * self.updates(1)} per epoch of "
            f"{self.iterations_per_epoch} iterations"
        )
        if self.updates(1) < self.iterations_per_epoch:
            yield f"it learns in {self.updates(1)} iterations of the first epoch"
        if self.epochs is not None and self.total_steps is not None:
            drawn = self.groups * self.iterations_per_epoch * self.epochs
            yield (
                f"max_epochs {self.epochs}: {self.total_steps} optimizer steps; {drawn:,} prompts "
                f"are drawn from {self.prompts:,} ({drawn / self.prompts:.2g} times each)"
            )


def largest_share(groups: int, ranks: int, minibatches: int) -> int:
    """Groups of one minibatch that a rank may have: all of them, if it has so many."""
    return min(groups // ranks, ceil(groups / minibatches))


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def with_longest_whole(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """All prompts, of which the ``count`` longest have their pictures: those of all may be many."""
    found: list[Prompt] = []
    whole: list[tuple[int, int]] = []  # a heap of lengths and places; of equals the last goes first
    for prompt in prompts:
        found.append(prompt)
        heapq.heappush(whole, (len(prompt.token_ids), -len(found)))
        if len(whole) > count:
            _, place = heapq.heappop(whole)
            found[-place - 1] = replace(found[-place - 1], pictures=[], places=[])
    return found


def largest_rollouts(
    prompts: Sequence[Prompt], groups: int, group_size: int, max_tokens: int
) -> list[Rollout]:
    """Rollouts of the ``groups`` longest prompts, with completions of ``max_tokens`` tokens."""
    longest = sorted(prompts, key=lambda p: len(p.token_ids), reverse=True)
    rollouts = []
    for group in range(groups):
        prompt = longest[group % len(longest)]
        for sample in range(group_size):
            # Any token will do: only lengths matter, and that prompts can be told apart.
            written = prompt.token_ids[-1:] * max_tokens
            rollout = Rollout(prompt, str(group), sample, 0, status=RolloutStatus.COMPLETED)
            rollout.rows[0].append_written(written, [0.0] * max_tokens, [0] * max_tokens)
            rollouts.append(rollout)
    return rollouts


def cut(batch: TensorDict, minibatches: int, max_tokens_per_pack: int) -> list[list[TensorDict]]:
    """The packs of each minibatch, as ``PolicyModule.update`` cuts them on one process."""
    generator = torch.Generator().manual_seed(0)
    parts = [select(batch, rows) for rows in split_minibatches(batch, minibatches, generator)]
    return [
        [select(part, rows) for rows in split_packs(part, max_tokens_per_pack)] for part in parts
    ]


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Placement:
    """The way a Trainer computes, and the place where it keeps what it trains.

    Weights are shared by ``shards`` processes (FSDP2), 1: each has them whole; with ``cpu_offload``
    what each has of them is in host memory. ``sequence`` processes compute a pack together, and
    ``tensor`` have matrices together, of which each part has its own ``shards``. ``expert``
    processes, of those that share weights, have experts together. ``device`` is what computes, in
    Lightning's ``precision``; with ``masters`` weights of 16 bits are trained in copies of 32.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "32-true"
    masters: bool = True
    shards: int = 1
    cpu_offload: bool = False
    sequence: int = 1
    tensor: int = 1
    expert: int = 1


SHARE = "share the weights: strategy ShardedStrategy with more devices, or its cpu_offload: true"
LESS_STATE = f"train with lora, or {SHARE}"
LONGER = "for long rollouts ShardedStrategy(sequence=2)"
LESS_ACTIVATIONS = f"lower max_tokens_per_pack, or set gradient_checkpointing: true; {LONGER}"


@dataclass(frozen=True)
class Advice:
    """What to switch on next for less ``state``, all that stays between updates; for less
    ``activations``, all else.
    """

    state: str
    activations: str


def next_advice(
    policy: Policy, found: Activations, wide_state: bool, placement: Placement
) -> Advice:
    """What is not switched on yet; ``wide_state``: the optimizer keeps more than 3 bytes a weight.

    Cheaper remedies come before those that take more devices.
    """
    ways = ["train with lora"] if policy.lora is None else []
    if placement.shards * placement.tensor > 1:
        more = "more devices, or ShardedStrategy's cpu_offload: true"
        ways.append("more devices" if placement.cpu_offload else more)
    else:
        if wide_state:
            ways.append("set optimizer: bitsandbytes.optim.AdamW8bit")
        ways.append(SHARE)
    recompute, lower = policy.recompute, f"lower max_tokens_per_pack; {LONGER}"
    if recompute is None:
        less = LESS_ACTIVATIONS
    elif recompute.inputs == "device" and (recompute.mlp_tokens or found.kept > found.turn):
        less = f"set gradient_checkpointing: {{inputs: host}}, or {lower}"
    elif recompute.mlp_tokens is None and found.turn:
        less = f"set gradient_checkpointing.mlp_tokens: 4096, or {lower}"
    else:
        less = lower
    return Advice(", or ".join(ways), less)


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
        stays.update({name: size for name, size in plan.parts.items() if name.startswith(_STAYS)})
    most = max(plans, key=lambda plan: plan.total - plan.sum_of(*_STAYS))
    rest = {name: size for name, size in most.parts.items() if not name.startswith(_STAYS)}
    return MemoryPlan(dict(stays) | rest, most.host, most.advice)


_STAYS = ("weights", "other models", "gradients", "optimizer", "master weights")
"""Parts, or their beginnings, that are there between updates too."""


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


@dataclass(frozen=True)
class CardPlan:
    """A training process and what works beside it, on one GPU; all in bytes.

    ``engine`` is what the engine takes of this GPU, and ``at_start`` what has to be free when it
    starts, beside weights and other models; ``push_buffers``, what rank 0 sends weights from. An
    engine that ``sleeps`` takes nothing in between, but needs as much in each iteration as at its
    start, and then the optimizer's state is there, too.
    """

    card: int
    training: MemoryPlan
    engine: int = 0
    at_start: int = 0
    push_buffers: int = 0
    sleeps: bool = False

    @property
    def missing(self) -> int:
        """Bytes that the GPU lacks; none or less: it fits."""
        asleep = ("optimizer", "master weights") if self.sleeps else ()
        stays = self.training.sum_of("weights", "other models", *asleep)
        needed = self.training.total + self.engine + self.push_buffers
        return max(needed, stays + self.at_start) - self.card

    @property
    def verdict(self) -> str:
        """What is needed, and whether it fits."""
        parts = {
            "training": self.training.total,
            "engine": self.engine,
            "engine in turn": self.at_start if self.sleeps else 0,
            "buffers of a push": self.push_buffers,
        }
        together = " + ".join(f"{in_units(size)} {name}" for name, size in parts.items() if size)
        if self.missing <= 0:
            return f"{together}: fits, {in_units(-self.missing)} to spare"
        return f"{together}: DOES NOT FIT, {in_units(self.missing)} too much"

    def lines(self) -> Iterator[str]:
        """Yield lines for a person."""
        told = f"GPU of {in_units(self.card)}: {self.verdict}"
        yield told if self.missing <= 0 else f"{told}; {self.advice}"

    @property
    def advice(self) -> str:
        """About the largest of what can be made smaller."""
        state = self.training.sum_of(*_STAYS)
        engine = self.at_start if self.sleeps else self.engine
        sleeping = "" if self.sleeps else ", or let it sleep meanwhile (sleep_level)"
        sizes = {
            self.training.advice.state: state,
            self.training.advice.activations: self.training.total - state,
            f"lower the engine's gpu_memory_utilization or kv_cache_gb{sleeping}": engine,
        }
        return max(sizes, key=lambda advice: sizes[advice])
