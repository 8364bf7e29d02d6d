"""What each process of benchmarks/parallel.py does: it shares packs with the others, and compares.

    RANK=0 WORLD_SIZE=2 ... python -m benchmarks.parallel_ranks <model> <folder> [<scenario> ...]

The environment is torchrun's. Each scenario leaves ``<scenario>_<rank>.json``.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory import FollowAllocations
from benchmarks.task import quiet_trainer
from lightning_rl.cli.activations import kept_for_backward, shared_activations
from lightning_rl.cli.plan import Placement, largest_rollouts, training_memory
from lightning_rl.cli.plan_parts import one_part
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models import key_exchange, sequence
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.sharding import ShardedStrategy, full_tensor
from lightning_rl.models.sharing import head_counts, head_ranks
from lightning_rl.models.tensor import TensorRanks
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row, SamplingDistribution

KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda model: {},
    "shared": lambda model: {"value_head": SharedValueHead()},
    "separate": lambda model: {"value_head": SeparateValueHead(model)},
    "lora": lambda model: {"lora": LoRA(rank=4)},
    "recomputed": lambda model: {
        "gradient_checkpointing": Recompute(inputs="host", keep="attention", mlp_tokens=8)
    },
}
FEATURES = (*KINDS, "one_silent", "all_silent", "brief", "float32")
"""All but the last are compared in float64."""
LAYOUTS: dict[str, Callable[[int], tuple[int, int]]] = {
    "sequence": lambda ranks: (ranks, 1),
    "tensor": lambda ranks: (1, 2),
    "both": lambda ranks: (ranks // 2, 2),
}
"""Ranks that share a pack's tokens, and those that share the model's matrices; by name."""


def rollouts(rank: int) -> list[Rollout]:
    """Of a rank: two groups that share prompts, of uneven lengths; penalties and given tokens."""
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
    """One, of which fewer tokens are computed than there are ranks, but for the last."""
    row, count = Row([2]), rank + 1
    row.append_written([3 + rank] * count, [0.0] * count, [0] * count)
    return [Rollout(Prompt("0", "", [2]), f"{rank}", 0, seed=0, rows=[row])]


def pack_of(made: list[Rollout], silent: bool) -> TensorDict:
    batch = pack_rollouts(made)
    if silent:
        batch["tokens", "loss_mask"] = torch.zeros_like(batch["tokens", "loss_mask"])
    return batch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(policy: Policy, pack: TensorDict, rank: int) -> tuple[Tensor, list[list[float]]]:
    """A loss in which each number has a weight of its own, and the numbers."""
    scores = policy(pack)
    columns = [x for x in (scores.logprobs, scores.entropy, scores.values) if x is not None]
    weights = torch.linspace(0.5 + rank, 1.5, len(scores.live))
    loss = sum((weights * column).sum() * (i + 1) for i, column in enumerate(columns))
    assert isinstance(loss, Tensor)
    return loss, [column.tolist() for column in columns]


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Of whole parameters, though a rank may have a part of them."""
    return {
        name: full_tensor(torch.zeros_like(p) if p.grad is None else p.grad).clone()
        for name, p in policy.named_parameters()
        if p.requires_grad
    }


def share(policy: Policy, layout: str) -> None:
    """Let all ranks compute packs together in a layout, each with all weights that it needs."""
    size = dist.get_world_size()
    sequence, tensor = LAYOUTS[layout](size)
    if tensor > 1:
        mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("data", "tensor"))
        policy.split(TensorRanks(mesh["tensor"]))
    policy.share_packs(sequence)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that this rank sends to others within layers and the head, message by message.

    Of n ranks, a share of an all-to-all is one's own; an all-gather takes a rank's own to all
    others; and an all-reduce takes each number to another rank and back, but for a rank's own n-th.
    """
    sent: list[int] = []
    exchange, reduced = sequence._exchanged, TensorRanks._reduced
    gather, add_up = key_exchange.gathered, key_exchange.summed

    def exchanging(parts: Tensor, group: Any) -> Tensor:
        sent.append(parts.nbytes * (len(parts) - 1) // len(parts))
        return exchange(parts, group)

    def gathering(rows: Tensor, group: Any) -> Tensor:
        sent.append(rows.nbytes * (dist.get_world_size(group) - 1))
        return gather(rows, group)

    def adding_up(rows: Tensor, group: Any) -> Tensor:
        size = dist.get_world_size(group)
        sent.append(rows.nbytes * (size - 1) // size)
        return add_up(rows, group)

    def reducing(ranks: TensorRanks, part: Tensor, operation: Any) -> Tensor:
        sent.append(2 * part.nbytes * (ranks.size - 1) // ranks.size)
        return reduced(ranks, part, operation)

    with (
        patch.multiple(sequence, _exchanged=exchanging),
        patch.multiple(key_exchange, gathered=gathering, summed=adding_up),
        patch.multiple(TensorRanks, _reduced=reducing),
    ):
        yield sent


def compare(
    model: str,
    layout: str,
    kind: str,
    silent: tuple[int, ...],
    dtype: torch.dtype,
    made: Callable[[int], list[Rollout]],
) -> dict[str, float]:
    """As :func:`compare_packs`, of a kind of policy, on what is ``made`` for each rank.

    Packs of ``silent`` ranks have no loss.
    """
    packs = [pack_of(made(rank), rank in silent) for rank in range(dist.get_world_size())]
    return compare_packs(policy_of(model, dtype, **KINDS[kind](model)), layout, packs)


def policy_of(model: str, dtype: torch.dtype = torch.float64, **options: Any) -> Policy:
    """The same on all ranks."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        policy = Policy(model, **options).to(dtype)
        # A LoRA begins at zero, which would hide half of its gradients; so does a value head.
        for parameter in policy.parameters():
            if parameter.requires_grad and not parameter.abs().sum():
                torch.nn.init.normal_(parameter, std=0.1)
    return policy


def compare_packs(policy: Policy, layout: str, packs: Sequence[TensorDict]) -> dict[str, float]:
    """Largest differences between packs computed by one rank each, and by all together."""
    with default_dtype(next(policy.parameters()).dtype):
        alone = [loss_of(policy, pack, rank) for rank, pack in enumerate(packs)]
        sum(loss for loss, _ in alone).backward()  # type: ignore[union-attr]
        expected = gradients(policy)
        policy.zero_grad()
        share(policy, layout)
        rank = dist.get_rank()
        loss, columns = loss_of(policy, packs[rank], rank)
        loss.backward()
        found = gradients(policy)
        for grad in found.values():
            dist.all_reduce(grad)
    off = [
        abs(a - b)
        for ours, theirs in zip(columns, alone[rank][1], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {
        "numbers": len(off),
        "scores": max(off, default=0.0),
        "score": max((abs(a) for column in columns for a in column), default=0.0),
        "gradients": max(float((found[n] - g).abs().max()) for n, g in expected.items()),
        "gradient": max(float(g.abs().max()) for g in expected.values()),
    }


def kept(model: str, layout: str) -> dict[str, int]:
    """Of a rollout of rank 0, computed by it alone and by all together: what a rank has of it.

    ``together`` are bytes that autograd keeps on a rank, and ``planned`` what ``check`` says of
    them; ``sent`` bytes that a rank sends in both passes, and ``formula`` what they should be.
    """
    policy = Policy(model)
    shares, parts = LAYOUTS[layout](dist.get_world_size())
    alone, together, pack = kept_alone_and_together(policy, layout)
    with counted_bytes() as sent:
        policy(pack).logprobs.sum().backward()
    return {
        "planned": shared_activations(policy, alone, rollout_of(LONG), shares, 4),
        "together": together,
        "sent": sum(sent),
        "formula": 4 * (sent_for_tokens(policy, LONG, shares, parts))
        + 4 * (sent_for_matrices(policy, LONG, shares, parts)),
    }


def kept_recomputed(model: str, layout: str) -> dict[str, float]:
    """As :func:`kept`, of layers that are recomputed; with the ``share`` of what one rank keeps."""
    shares, _ = LAYOUTS[layout](dist.get_world_size())
    policy = Policy(model, gradient_checkpointing=True)
    alone, together, _ = kept_alone_and_together(policy, layout)
    return {"share": alone / shares, "together": together}


LONG = 1100
"""Tokens of a rollout, so many that attention has no mask, which nobody shares."""


def rollout_of(count: int) -> TensorDict:
    row = Row([2], [3] * count, [True] * count, [0.0] * count, [0] * count)
    return pack_rollouts([Rollout(Prompt("0", "", [2]), "0", 0, seed=0, rows=[row])])


def kept_alone_and_together(policy: Policy, layout: str) -> tuple[int, int, TensorDict]:
    """Bytes that autograd keeps on a rank, which then shares packs; and the pack of rank 0."""
    parts = LAYOUTS[layout](dist.get_world_size())[1]
    pack = rollout_of(LONG)
    own = policy if parts == 1 else one_part(policy, parts)
    alone = kept_for_backward(own, pack).activations
    share(policy, layout)
    if dist.get_rank():
        pack["tokens", "loss_mask"] = torch.zeros_like(pack["tokens", "loss_mask"])
    return alone, kept_for_backward(policy, pack).activations, pack


def sent_for_tokens(policy: Policy, count: int, shares: int, parts: int) -> int:
    """Numbers that a rank sends for ``count`` tokens, of which it has one share."""
    config = policy.lm.config
    heads, keys = head_counts(config, parts)
    together = head_ranks(shares, heads, keys)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    copied = max(keys, together)
    # Per layer and token: queries, keys and values there, outputs back; and their gradients. Each
    # of its tokens goes to the other ranks by heads.
    by_heads = 2 * (2 * heads + 2 * copied) * (together - 1) // together
    # What a rank then has of keys and values, to each of those that share its heads; and back.
    by_queries = 2 * 2 * copied * (shares // together - 1)
    return config.num_hidden_layers * (by_heads + by_queries) * width * -(-count // shares)


def sent_for_matrices(policy: Policy, count: int, shares: int, parts: int) -> int:
    """Numbers that a rank sends for its share of ``count`` tokens, of which it has one part."""
    config = policy.lm.config
    tokens = -(-count // shares)
    # Per layer and token: outputs of attention and MLP, and their inputs' gradients.
    layers = 4 * config.num_hidden_layers * config.hidden_size * tokens
    # Embeddings, and gradients of the last states.
    ends = 2 * config.hidden_size * tokens
    # The largest logit, and three sums.
    head = 4 * tokens
    # Gradients of what all ranks use alike within attention: norms of queries and keys.
    own = sum(p.numel() for name, p in policy.named_parameters() if name.endswith(NORMS))
    return 2 * (layers + ends + head + own) * (parts - 1) // parts


class LaterUpdates(Callback):
    """Follows each update but the first, before which the optimizer has no state.

    ``peak`` is that of the one that had least: what gloo sends is let go of by threads of its own,
    a little sooner or later.
    """

    def __init__(self) -> None:
        self.followed: list[FollowAllocations] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number:
            self.followed.append(FollowAllocations())
            self.followed[-1].on_train_batch_start()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        if number:
            self.followed[-1].on_train_batch_end()

    @property
    def peak(self) -> int:
        return min(one.peak for one in self.followed)


NORMS = ("q_norm.weight", "k_norm.weight")
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
"""A model of which neither logits nor weights outweigh all else."""


def peak(model: str, layout: str) -> dict[str, int]:
    """Of an update: the most that a rank has allocated at a time, and what ``check`` says of it."""
    world = dist.get_world_size()
    shares, parts = LAYOUTS[layout](world)
    settings = SMALL | {"bos_token_id": None}
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(8)]
    rollouts = largest_rollouts(prompts, 2, 4, 128)
    for rollout in rollouts:  # else the update would leave them out
        rollout.reward = float(rollout.sample_index % 2)
    batch = pack_rollouts(rollouts)
    policy = Policy(model, random_init=True, loading=Loading(model_kwargs=settings))
    placement = Placement(shards=world // parts, sequence=shares, tensor=parts)
    planned = training_memory(policy, [], torch.optim.AdamW, batch, placement)
    follow = LaterUpdates()
    strategy = ShardedStrategy(sequence=shares, tensor=parts)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, [follow], devices=world, strategy=strategy)
        module = PolicyModule(
            model, random_init=True, model_kwargs=settings, max_tokens_per_pack=1 << 20,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        )  # fmt: skip
        trainer.fit(module, LazyLoader(lambda _: batch, 5))
    before = planned.sum_of("weights", "optimizer")  # gradients are made anew
    return {"planned": planned.total, "measured": follow.peak + before}


def scenarios(model: str) -> dict[str, Callable[[], Any]]:
    """By name: a layout and a feature."""
    ranks = dist.get_world_size()
    everyone = tuple(range(ranks))

    def of(layout: str, feature: str) -> Callable[[], Any]:
        silent = {"one_silent": everyone[:1], "all_silent": everyone}.get(feature, ())
        kind = {"one_silent": "shared"}.get(feature, feature if feature in KINDS else "plain")
        dtype = torch.float32 if feature == "float32" else torch.float64
        made = brief if feature == "brief" else rollouts
        return lambda: compare(model, layout, kind, silent, dtype, made)

    found = {f"{name}_{feature}": of(name, feature) for name in LAYOUTS for feature in FEATURES}
    for name in LAYOUTS:
        found |= {f"{name}_kept": partial(kept, model, name)}
        found |= {f"{name}_kept_recomputed": partial(kept_recomputed, model, name)}
        found |= {f"{name}_peak": partial(peak, model, name)}
    return found


def main() -> None:
    model, where, *only = sys.argv[1:]
    dist.init_process_group("gloo")
    for name, scenario in scenarios(model).items():
        if not only or name in only:
            result = json.dumps(scenario())
            (Path(where) / f"{name}_{dist.get_rank()}.json").write_text(result)


if __name__ == "__main__":
    main()
