"""Measure for benchmarks/parallel/ranks.py the bytes that a rank keeps, sends and has at a time."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from tensordict import TensorDict
from torch import Tensor

from benchmarks.parallel.layouts import LAYOUTS, share
from benchmarks.support.allocations import FollowAllocations
from benchmarks.support.task import quiet_trainer
from lightning_rl import Loading, UpdateSettings
from lightning_rl.algos.experts import RolloutRouting
from lightning_rl.cli.check.batches import largest_rollouts
from lightning_rl.cli.check.fake_models import copy_of
from lightning_rl.cli.check.memory import bytes_of_all_keys, training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.parallel import exchange, expert, keys as key_exchange
from lightning_rl.models.parallel.expert import experts_of, hosts_in
from lightning_rl.models.parallel.sharing import head_counts, head_ranks
from lightning_rl.models.parallel.strategy import ShardedStrategy
from lightning_rl.models.parallel.tensor import TensorRanks
from lightning_rl.models.policy import Policy
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Prompt, Rollout, Row
from tests.support.followed import kept_for_backward


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that this rank sends to others within layers and the head, by message.

    Of n ranks, a share of an all-to-all is one's own; an all-gather takes a rank's own to all
    others; and an all-reduce takes each number to another rank and back, but for a rank's own n-th.
    """
    sent: list[int] = []
    exchanged, reduced = exchange.exchanged, TensorRanks._reduced
    gathered, summed = key_exchange.gathered, key_exchange.summed

    def exchanging(rows: Tensor, group: Any, counts: Any = None) -> Tensor:
        size = dist.get_world_size(group)
        kept = len(rows) // size if counts is None else counts[0][dist.get_rank(group)]
        sent.append(rows[kept:].nbytes)
        return exchanged(rows, group, counts)

    def gathering(rows: Tensor, group: Any) -> Tensor:
        sent.append(rows.nbytes * (dist.get_world_size(group) - 1))
        return gathered(rows, group)

    def adding_up(rows: Tensor, group: Any) -> Tensor:
        size = dist.get_world_size(group)
        sent.append(rows.nbytes * (size - 1) // size)
        return summed(rows, group)

    def reducing(ranks: TensorRanks, part: Tensor, operation: Any) -> Tensor:
        sent.append(2 * part.nbytes * (ranks.size - 1) // ranks.size)
        return reduced(ranks, part, operation)

    with (
        patch.multiple(exchange, exchanged=exchanging),
        patch.multiple(expert, exchanged=exchanging),
        patch.multiple(key_exchange, gathered=gathering, summed=adding_up),
        patch.multiple(TensorRanks, _reduced=reducing),
    ):
        yield sent


LONG, LONG_AND_EVEN = 1100, 1152
"""Tokens of a rollout, so many that attention has no mask, which nobody shares.

Those of most micro-batches make unequal shares; but of a mixture all experts are to get as many.
"""


def length_for(policy: Policy) -> int:
    """Return the tokens of the rollout that a policy computes."""
    return LONG_AND_EVEN if experts_of(policy) else LONG


def kept(model: str, layout: str) -> dict[str, float]:
    """Measure what rank 0 keeps of a rollout that it computes alone, and together with all others.

    ``together`` are bytes that autograd keeps on a rank, and ``planned`` what ``check`` says of
    them; ``sent`` bytes that a rank sends in both passes, and ``formula`` what they should be.
    """
    policy = Policy(model)
    shares, parts, experts = LAYOUTS[layout](dist.get_world_size())
    count = length_for(policy)
    alone, together, micro_batch = kept_alone_and_together(policy, layout)
    with counted_bytes() as sent:
        policy(micro_batch).logprobs.sum().backward()
    return {
        "planned": round(alone / shares + bytes_of_all_keys(policy, rollout_of(count), shares, 4)),
        "together": together,
        "sent": sum(sent),
        "formula": 4 * (sent_for_tokens(policy, count, shares, parts))
        + 4 * (sent_for_matrices(policy, count, shares, parts))
        + sent_for_experts(policy, count, shares, experts),
    }


def kept_recomputed(model: str, layout: str) -> dict[str, float]:
    """Measure as :func:`kept` does, with recomputed layers; ``share`` is a rank's part."""
    shares = LAYOUTS[layout](dist.get_world_size()).sequence
    policy = Policy(model, loading=Loading(gradient_checkpointing=True))
    alone, together, _ = kept_alone_and_together(policy, layout)
    return {"share": alone / shares, "together": together}


def rollout_of(count: int) -> TensorDict:
    row = Row([2], [3] * count, [True] * count, [0.0] * count, [0] * count)
    return pack_rollouts([Rollout(Prompt("0", "", [2]), "0", 0, seed=0, rows=[row])])


def kept_alone_and_together(policy: Policy, layout: str) -> tuple[float, float, TensorDict]:
    """Return the bytes kept between both passes, alone and with others, and rank 0's
    micro-batch."""
    _, parts, experts = LAYOUTS[layout](dist.get_world_size())
    micro_batch = rollout_of(length_for(policy))
    if experts_of(policy):
        route_evenly(policy, micro_batch)
    own = copy_of(policy, parts, experts, fake=False) if parts * experts > 1 else policy
    alone = kept_for_backward(own, micro_batch)
    share(policy, layout)
    if dist.get_rank():
        micro_batch["tokens", "loss_mask"] = torch.zeros_like(micro_batch["tokens", "loss_mask"])
    return alone, kept_for_backward(policy, micro_batch), micro_batch


def route_evenly(policy: Policy, micro_batch: TensorDict) -> None:
    """Let the tokens of a micro-batch choose experts in turns, so that all get as many."""
    config, policy.replays = policy.lm.config, True
    choices = config.num_experts_per_tok
    chosen = torch.arange(len(micro_batch["tokens"]) * choices) % experts_of(policy)[0].num_experts
    routes = chosen.reshape(-1, 1, choices).expand(-1, config.num_hidden_layers, -1)
    micro_batch["tokens", "routed_experts"] = routes.to(torch.int16)


def sent_for_tokens(policy: Policy, count: int, shares: int, parts: int) -> int:
    """Count what a rank sends for ``count`` tokens, of which it has one share."""
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
    """Count what a rank sends for its share of ``count`` tokens, of which it has one part."""
    config = policy.lm.config
    tokens = -(-count // shares)
    # Each layer and token has outputs of attention and MLP, and their inputs' gradients.
    layers = 4 * config.num_hidden_layers * config.hidden_size * tokens
    # Embeddings, and gradients of the last states.
    ends = 2 * config.hidden_size * tokens
    # The largest logit, and three sums.
    head = 4 * tokens
    # Gradients of what all ranks use alike within attention: norms of queries and keys.
    own = sum(p.numel() for name, p in policy.named_parameters() if name.endswith(NORMS))
    return 2 * (layers + ends + head + own) * (parts - 1) // parts


def sent_for_experts(policy: Policy, count: int, shares: int, ranks: int) -> int:
    """Count bytes that a rank sends for its share of ``count`` tokens, and for others' tokens.

    Of all ranks at an even load: each layer's K copies of a token's state go to other ranks, what
    they compute comes back, and so do gradients; and it is told how many come for each expert.
    """
    if ranks == 1:
        return 0
    config, hosts = policy.lm.config, hosts_in(policy)
    states = 4 * config.num_experts_per_tok * -(-count // shares) * config.hidden_size
    counted = 8 * hosts[0].num_experts * ranks  # of 8 bytes each
    return len(hosts) * (4 * states + counted) * (ranks - 1) // ranks


class LaterUpdates(Callback):
    """Follows each update but the first, before which the optimizer has no state.

    ``peak`` is that of the one that had least: what gloo sends is let go of by threads of its own,
    a little sooner or later, which only shows when its place is taken.
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
    """Return the most bytes that a rank allocates in an update, and what ``check`` says of it."""
    world = dist.get_world_size()
    shares, parts, experts = LAYOUTS[layout](world)
    settings = SMALL | {"bos_token_id": None}
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(8)]
    rollouts = largest_rollouts(prompts, 2, 4, 128)
    for rollout in rollouts:  # else the update would leave them out
        rollout.reward = float(rollout.sample_index % 2)
    batch = pack_rollouts(rollouts)
    policy = Policy(model, loading=Loading(random_init=True, model_kwargs=settings))
    replay = None
    if experts_of(policy):
        route_evenly(policy, batch)
        replay = RolloutRouting()
    placement = Placement(shards=world // parts, sequence=shares, tensor=parts, expert=experts)
    planned = training_memory(
        policy, [], torch.optim.AdamW, batch, placement, passes=shares * parts
    )
    follow = LaterUpdates()
    strategy = ShardedStrategy(sequence=shares, tensor=parts, expert=experts)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, [follow], devices=world, strategy=strategy)
        module = PolicyModule(
            model, update=UpdateSettings(max_tokens_per_micro_batch=1 << 20),
            loading=Loading(random_init=True, model_kwargs=settings),
            routing_replay=replay, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        )  # fmt: skip
        trainer.fit(module, LazyLoader(lambda _: batch, 5))
    # Gradients, too: those of the update before are let go of in this one.
    return {"planned": planned.total, "measured": follow.peak + sum(planned.stays.values())}
