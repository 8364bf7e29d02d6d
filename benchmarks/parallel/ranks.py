"""Compute micro-batches together in processes of benchmarks/parallel, and compare with one by
one."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.parallel.costs import kept, kept_recomputed, peak
from benchmarks.parallel.layouts import begin, device, share
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.parallel.expert import experts_of
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from lightning_rl.models.recompute import Recompute
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row, SamplingDistribution

KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda model: {},
    "shared": lambda model: {"value_head": SharedValueHead()},
    "separate": lambda model: {"value_head": SeparateValueHead(model)},
    "lora": lambda model: {"lora": LoRA(rank=4)},
    "recomputed": lambda model: {
        "loading": Loading(
            gradient_checkpointing=Recompute(inputs="host", keep="attention", mlp_tokens=8)
        )
    },
    "again": lambda model: {
        "loading": Loading(gradient_checkpointing=Recompute(inputs="host", keep="attention"))
    },
}
OTHERS = ("one_silent", "all_silent", "brief", "float32")
FEATURES = ("plain", "shared", "separate", "lora", "recomputed", *OTHERS)
"""All but the last are compared in float64."""
OF_MIXTURES = ("plain", "separate", "lora", "again", "idle", *OTHERS)
"""For layouts of experts. ``idle``: all tokens choose experts of one rank."""


def rollouts(rank: int) -> list[Rollout]:
    """Make a rank's two groups with shared prompts, uneven lengths, penalties and given tokens."""
    rng = random.Random(rank)
    made = []
    for group in range(2):
        prompt = [rng.randrange(2, 13) for _ in range(rng.randint(1, 9))]
        for sample in range(3):
            ids = [rng.randrange(2, 13) for _ in range(rng.randint(1, 14))]
            mask = [rng.random() < 0.8 for _ in ids]
            zeros = [0.0] * len(ids)
            rollout = Rollout(
                Prompt(f"{group}", "", prompt),
                f"{rank}.{group}",
                sample,
                seed=0,
                sampling=SamplingDistribution(temperature=0.7, repetition_penalty=1.3),
                rows=[Row(prompt, ids, mask, zeros, [0] * len(ids))],
                status=RolloutStatus.COMPLETED,
                reward=0.0,
            )
            made.append(rollout)
    return made


def brief(rank: int) -> list[Rollout]:
    """Make a rollout of fewer computed tokens than there are ranks, but for the last."""
    row, count = Row([2]), rank + 1
    row.append_written([3 + rank] * count, [0.0] * count, [0] * count)
    return [Rollout(Prompt("0", "", [2]), f"{rank}", 0, seed=0, rows=[row])]


def micro_batch_of(made: list[Rollout], silent: bool) -> TensorDict:
    batch = pack_rollouts(made)
    if silent:
        batch["tokens", "loss_mask"] = torch.zeros_like(batch["tokens", "loss_mask"])
    return batch.to(device())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(policy: Policy, micro_batch: TensorDict, rank: int) -> tuple[Tensor, list[list[float]]]:
    """Return a loss in which each number has a weight of its own, and the numbers."""
    scores = policy(micro_batch)
    columns = [x for x in (scores.logprobs, scores.entropy, scores.values) if x is not None]
    weights = torch.linspace(0.5 + rank, 1.5, len(scores.live), device=scores.live.device)
    loss = sum((weights * column).sum() * (i + 1) for i, column in enumerate(columns))
    assert isinstance(loss, Tensor)
    return loss, [column.tolist() for column in columns]


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Return the gradients of whole parameters, though a rank may have a part of them."""
    return {
        name: full_tensor(torch.zeros_like(p) if p.grad is None else p.grad).clone()
        for name, p in policy.named_parameters()
        if p.requires_grad
    }


def compare(
    model: str,
    layout: str,
    kind: str,
    silent: tuple[int, ...],
    dtype: torch.dtype,
    made: Callable[[int], list[Rollout]] = rollouts,
    replayed: bool = False,
) -> dict[str, float]:
    """Compare as :func:`compare_micro_batches` does, for a kind of policy, on what is ``made`` per
    rank.

    Micro-batches of ``silent`` ranks have no loss. ``replayed``: all tokens go to the first
    experts. In float32 the same weights say in float64 what is right.
    """
    micro_batches = [
        micro_batch_of(made(rank), rank in silent) for rank in range(dist.get_world_size())
    ]
    policy = policy_of(model, dtype, **KINDS[kind](model))
    if replayed:
        config, policy.replays = policy.lm.config, True
        first = torch.arange(config.num_experts_per_tok, dtype=torch.int16)
        for micro_batch in micro_batches:
            shape = len(micro_batch["tokens"]), config.num_hidden_layers, len(first)
            micro_batch["tokens", "routed_experts"] = first.expand(shape).clone()
    exact = None
    if dtype == torch.float32:
        exact = policy_of(model, torch.float64, **KINDS[kind](model))
        exact.load_state_dict(policy.state_dict())
    return compare_micro_batches(policy, layout, micro_batches, exact)


def policy_of(model: str, dtype: torch.dtype = torch.float64, **options: Any) -> Policy:
    """Make a policy that is the same on all ranks."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        policy = Policy(model, **options).to(device(), dtype)
        if dtype == torch.float64 and experts_of(policy):  # which grouped products do not know
            for lm in policy.modules():
                if isinstance(lm, PreTrainedModel):
                    lm.set_experts_implementation("batched_mm")
        # A LoRA begins at zero, which would hide half of its gradients; so does a value head.
        for parameter in policy.parameters():
            if parameter.requires_grad and not parameter.abs().sum():
                torch.nn.init.normal_(parameter, std=0.1)
    return policy


def compare_micro_batches(
    policy: Policy, layout: str, micro_batches: Sequence[TensorDict], exact: Policy | None = None
) -> dict[str, float]:
    """Return the largest differences of micro-batches computed by one rank each, and by all
    together.

    Where an ``exact`` policy is there, also how far the gradients of either are from its:
    ``rounding``, and ``rounding_together``.
    """
    right = {} if exact is None else computed_alone(exact, micro_batches)[1]
    alone, expected = computed_alone(policy, micro_batches)
    with default_dtype(next(policy.parameters()).dtype):
        share(policy, layout)
        rank = dist.get_rank()
        loss, columns = loss_of(policy, micro_batches[rank], rank)
        loss.backward()
        found = gradients(policy)
        for grad in found.values():
            dist.all_reduce(grad)
    off = [
        abs(a - b)
        for ours, theirs in zip(columns, alone[rank][1], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    roundings = {
        name: max(float((of[n] - g).abs().max()) for n, g in right.items())
        for name, of in {"rounding": expected, "rounding_together": found}.items()
        if right
    }
    return roundings | {
        "numbers": len(off),
        "scores": max(off, default=0.0),
        "score": max((abs(a) for column in columns for a in column), default=0.0),
        "gradients": max(float((found[n] - g).abs().max()) for n, g in expected.items()),
        "gradient": max(float(g.abs().max()) for g in expected.values()),
    }


def computed_alone(
    policy: Policy, micro_batches: Sequence[TensorDict]
) -> tuple[list[tuple[Tensor, list[list[float]]]], dict[str, Tensor]]:
    """Return what :func:`loss_of` gives for each rank's micro-batch, and the gradients of all of
    them."""
    with default_dtype(next(policy.parameters()).dtype):
        alone = [
            loss_of(policy, micro_batch, rank) for rank, micro_batch in enumerate(micro_batches)
        ]
        sum(loss for loss, _ in alone).backward()  # type: ignore[union-attr]
        found = gradients(policy)
    policy.zero_grad()
    return alone, found


COSTS: dict[str, Callable[[str, str], Any]] = {
    "kept": kept,
    "kept_recomputed": kept_recomputed,
    "peak": peak,
}


def measure(model: str, scenario: str) -> dict[str, float]:
    """Measure the differences or costs of a layout with a feature, such as ``sequence_plain``."""
    begin()
    layout, _, feature = scenario.partition("_")
    if feature in COSTS:
        return COSTS[feature](model, layout)
    everyone = tuple(range(dist.get_world_size()))
    silent = {"one_silent": everyone[:1], "all_silent": everyone}.get(feature, ())
    kind = {"one_silent": "shared"}.get(feature, feature if feature in KINDS else "plain")
    dtype = torch.float32 if feature == "float32" else torch.float64
    made = brief if feature == "brief" else rollouts
    return compare(model, layout, kind, silent, dtype, made, feature == "idle")
