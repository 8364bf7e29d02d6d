"""A micro-batch's tokens over several ranks: DeepSpeed-Ulysses' sequence parallelism, and more.

Each of n ranks embeds and computes 1/n of a micro-batch's tokens. Attention needs all of them:
there an all-to-all gives each rank 1/n of the heads for every token, and another takes them back
(Jacobs et al. 2023, arXiv 2309.14509). Where a model has fewer heads, u of the ranks share them so,
and n / u such places share the queries (:mod:`lightning_rl.models.parallel.keys`). A picture is
seen by the ranks that have some of its tokens. A micro-batch stays its owner's. The others lend it
their devices, for which they call the policy at the same time, and hear nothing of it: so losses,
advantages, minibatches and metrics are what they are without.

Activations of a rollout take 1/n of the memory, so it may be n times as long.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from transformers import PretrainedConfig

from lightning_rl.data.batch import PackedBatch
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.batches import places_of
from lightning_rl.models.attention.packed import PackLayout, build_layout
from lightning_rl.models.parallel.exchange import AllToAll
from lightning_rl.models.parallel.sharing import (
    HeadSharing,
    QuerySharing,
    Sharing,
    head_counts,
    head_ranks,
)
from lightning_rl.models.parallel.tensor import TensorRanks
from lightning_rl.models.routing import RouterOutputs, joined
from lightning_rl.run.processes.dist import all_reduce_max
from lightning_rl.vision.batch import NAME as PICTURES, as_column, sight_in

T = TypeVar("T")


class Scores(NamedTuple):  # FSDP finds the tensors that a backward pass begins with in it
    """Scores of a micro-batch's M loss tokens; ``live`` are their indices in the micro-batch.

    ``router_outputs`` is of all tokens of the forward pass, where a mixture's routers are known; of
    several ranks that compute micro-batches together, of those tokens that this one computed.
    ``likeliest`` (M, K) are the logprobs of the tokens that a teacher finds likeliest, if the
    policy follows one.
    """

    live: Tensor
    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    router_outputs: RouterOutputs | None = None
    likeliest: Tensor | None = None


Scorer = Callable[[TensorDict, PackLayout], Scores]
"""Scores the loss tokens of a micro-batch that a layout names."""


class MicroBatchRanks:
    """Neighbouring ranks that compute each other's micro-batches together.

    Each has some of a micro-batch's tokens (``sequence``), or some of the model's matrices
    (``tensor``, :mod:`lightning_rl.models.parallel.tensor`), or both. Also where they share
    matrices, micro-batches stay their owners': ranks that had the same rollouts would have to agree
    on which of them collects, records and saves them, and their engines would write everything n
    times, or all but one idle. So of n ranks that share matrices each learns from all n
    micro-batches, one after another. Losses are weighted to be averaged over all ranks of the run,
    and FSDP2 averages over world / n of them, those with the same part of the matrices: it gets 1/n
    of each gradient.

    All ranks of the run make theirs at the same time.

    Args:
        config: the model's configuration.
        sequence: number of ranks that share the tokens of a micro-batch.
        tensor: ranks that share the matrices; None: each has all of them.

    Raises:
        ConfigError: if they do not divide the number of ranks.
    """

    def __init__(
        self, config: PretrainedConfig, sequence: int = 1, tensor: TensorRanks | None = None
    ) -> None:
        world = dist.get_world_size()
        self.copies = 1 if tensor is None else tensor.size
        self.size = sequence * self.copies
        if world % self.size:
            raise ConfigError(
                f"sequence={sequence} does not divide the run's {world // self.copies} processes; "
                "change it, or trainer.devices and num_nodes"
            )
        self.group: Any
        self.group, _ = dist.new_subgroups(self.size)
        self.index = dist.get_rank(self.group)
        self.shares, self.share = sequence, self.index // self.copies
        self.holders = self.group if self.copies == 1 else self._every(1, sequence)
        """Ranks with this one's part of the matrices, and other tokens of its micro-batches."""
        self.sharing = self._sharing(head_ranks(sequence, *head_counts(config, self.copies)))

    def _every(self, step: int, count: int) -> Any:
        """Return the group of ``count`` shares, ``step`` apart, that includes this rank's."""
        if count == 1:
            return None  # this one alone
        block = step * count * self.copies
        groups = [
            list(range(first, first + block, step * self.copies))
            for begin in range(0, dist.get_world_size(), block)
            for first in range(begin, begin + step * self.copies)
        ]
        result, _ = dist.new_subgroups_by_enumeration(groups)
        return result

    def _sharing(self, heads: int) -> Sharing:
        """Return the sharing in which ``heads`` neighbours share heads, and the rest queries."""
        places = self.shares // heads
        group = self.holders if places == 1 else self._every(1, heads)
        exchange = None if heads == 1 else partial(HeadExchange, group, heads)
        if places == 1:
            return HeadSharing(self.shares, exchange)
        others = self.holders if heads == 1 else self._every(heads, places)
        return QuerySharing(self.share // heads, others, places, heads, exchange)

    def scores(self, micro_batch: TensorDict, score: Scorer) -> Scores:
        """Score this rank's micro-batch; all of these ranks call it together, each with its own.

        Micro-batches with loss tokens are computed one after another, each by all. A micro-batch
        without any is not, but a backward pass from its empty scores takes part in those of the
        others.
        """
        tokens = micro_batch["tokens"]
        live = tokens["loss_mask"].nonzero().squeeze(1)
        micro_batches = self._micro_batches(micro_batch, bool(len(live)))
        parts = [
            self._together(_on(tokens["loss_mask"].device, theirs), owner, score)
            for owner, theirs in micro_batches
        ]
        columns, router_outputs = zip(*parts, strict=True)
        logprobs, entropy, *values = map(torch.cat, zip(*columns, strict=True))
        # Else it is computed for its sake.
        counts = bool(micro_batches[0][1]["tokens", "loss_mask"].any())
        together = None if router_outputs[0] is None else joined(router_outputs, counts)
        return Scores(live, logprobs, entropy, values[0] if values else None, together)

    def _micro_batches(
        self, micro_batch: TensorDict, has_loss: bool
    ) -> list[tuple[int, TensorDict]]:
        """Return micro-batches with loss tokens, on the CPU, and their owners; else the first."""
        ours = _columns(micro_batch) if has_loss else None
        micro_batches: list[TensorDict | None] = [None] * self.size
        dist.all_gather_object(micro_batches, ours, group=self.group)
        result = [
            (owner, theirs) for owner, theirs in enumerate(micro_batches) if theirs is not None
        ]
        if result:
            return result
        shared: list[TensorDict] = [_columns(micro_batch)]
        dist.broadcast_object_list(shared, group=self.group, group_src=0)
        return [(0, shared[0])]

    def _together(
        self, micro_batch: TensorDict, owner: int, score: Scorer
    ) -> tuple[tuple[Tensor, ...], RouterOutputs | None]:
        """Score a micro-batch: return logprobs, entropies, values (M,) for its owner, else (0,).

        With them comes what the routers did with this rank's tokens.
        """
        layout = build_layout(micro_batch)
        dealt = self.sharing.deal(layout.segments)
        device, share = layout.tokens.device, len(dealt.order) // self.shares
        begin = self.share * share
        predictors = places_of(dealt.order, len(layout.tokens)).to(device)[layout.predictors]
        holder = predictors // share
        own = (holder == self.share).nonzero().squeeze(1)
        order = dealt.order[begin : begin + share]
        tokens = order.clamp(min=0).to(device)  # lacking: the first
        found = score(
            micro_batch,
            PackLayout(
                input_ids=layout.input_ids[tokens],
                tokens=layout.tokens[tokens],
                position_ids=layout.position_ids[tokens],
                live=layout.live[own],
                rows=layout.rows[own],
                predictors=predictors[own] - begin,
                segments=layout.segments,
                longest=layout.longest,
                exchange=dealt.exchange,
                seen=dealt.seen,
                own=(order >= 0).to(device),
            ),
        )
        columns = [found.logprobs, found.entropy]
        columns += [] if found.values is None else [found.values]
        wide = torch.promote_types(found.logprobs.dtype, columns[-1].dtype)
        sent = _ToOwner.apply(self, owner, holder, own, *(column.to(wide) for column in columns))
        return sent, found.router_outputs


_SCORED = ("input_ids", "loss_mask", "no_end", "turn_start", "routed_experts")


def _columns(micro_batch: TensorDict) -> TensorDict:
    """Return the columns of a micro-batch that scoring reads, on the CPU."""
    tokens = micro_batch["tokens"]
    names = [n for n in _SCORED if n in tokens]
    parts = {"tokens": tokens.select(*names, *sight_in(tokens)).cpu(), **_table(micro_batch)}
    return PackedBatch({**parts, "rollouts": micro_batch["rollouts"].cpu()}, batch_size=[])


def _table(micro_batch: TensorDict) -> dict[str, Any]:
    """Return the table of a micro-batch's pictures, if it has any."""
    return {PICTURES: as_column(micro_batch[PICTURES])} if PICTURES in micro_batch else {}


def _on(device: torch.device, micro_batch: TensorDict) -> TensorDict:
    """Copy a micro-batch to a device, keeping a copy on the CPU for its layout."""
    if device.type == "cpu":
        return micro_batch
    parts = {name: micro_batch[name].to(device) for name in ("tokens", "rollouts")}
    return PackedBatch({**parts, **_table(micro_batch), "host": micro_batch}, batch_size=[])


def require_heads(size: int, query: int, key: int) -> None:
    """Check that ranks can share a layer's heads, which may differ from the configuration's.

    Raises:
        ConfigError: if they cannot.
    """
    if query % size or (key % size and size % key):
        raise ConfigError(
            f"{size} processes cannot share a layer of {query} attention and {key} key-value "
            "heads, which the model's num_attention_heads and num_key_value_heads do not tell of; "
            "set sequence: 1"
        )


class HeadExchange:
    """Exchanges a layer's heads between ranks that share S tokens, s each.

    Shares have equal length; the last ones are padded.
    """

    def __init__(self, group: Any, size: int, tokens: int) -> None:
        self.group, self.size, self.tokens = group, size, tokens

    @torch.compiler.disable  # ranks exchange tokens
    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Exchange q, k and v (s, H, D) of own tokens for (S, H / n, D) of own heads."""
        size = self.size
        require_heads(size, q.shape[1], k.shape[1])
        copied = (x.repeat_interleave(max(1, size // x.shape[1]), 1) for x in (q, k, v))
        split = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in copied]
        counts = [x.shape[2] for x in split]
        # In one message: (n, s, all of a rank's heads, D), of which the k-th part is rank k's.
        received = AllToAll.apply(torch.cat(split, 2), self.group, None)
        return received.flatten(0, 1)[: self.tokens].split(counts, 1)

    @torch.compiler.disable  # ranks exchange tokens
    def gather_heads(self, output: Tensor) -> Tensor:
        """Exchange outputs (S, H / n, D) of own heads for (s, H, D) of own tokens."""
        share = -(-self.tokens // self.size)
        filled = F.pad(output, (0, 0, 0, 0, 0, share * self.size - self.tokens))
        received = AllToAll.apply(filled.unflatten(0, (self.size, share)), self.group, None)
        return received.transpose(0, 1).flatten(1, 2)


class _ToOwner(torch.autograd.Function):
    """Sends columns of a micro-batch's M loss tokens to its owner: each rank what it computed.

    ``holder`` (M,) says which rank computes which. Gradients go from the owner to all ranks; a
    column without one has none anywhere.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: MicroBatchRanks, owner: int, holder: Tensor, own: Tensor, *columns: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.owner, ctx.count = ranks, owner, len(holder)
        ctx.like = columns[0]
        ctx.save_for_backward(own)
        ctx.set_materialize_grads(False)
        given = torch.stack(columns)
        counts = torch.bincount(holder, minlength=ranks.shares).tolist()
        padded = F.pad(given, (0, max(counts) - given.shape[1]))
        parts = [padded]
        if ranks.shares > 1:
            parts = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(parts, padded, group=ranks.holders)
        if ranks.index != owner:
            return tuple(given[:, :0].unbind())
        ordered = torch.cat([p[:, :n] for p, n in zip(parts, counts, strict=True)], 1)
        whole = torch.empty_like(ordered)
        whole[:, holder.argsort(stable=True)] = ordered
        return tuple(whole.unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        [own] = ctx.saved_tensors
        # A last number says whether there is a gradient.
        told = ctx.like.new_zeros(len(grads), ctx.count + 1)
        if ctx.ranks.index == ctx.owner:
            for row, grad in zip(told, grads, strict=True):
                if grad is not None:
                    row[:-1], row[-1] = grad / ctx.ranks.copies, 1.0
        dist.broadcast(told, group=ctx.ranks.group, group_src=ctx.owner)
        has_any = told[:, -1].tolist()
        found = [row[own] if has else None for row, has in zip(told, has_any, strict=True)]
        return None, None, None, None, *found


def turns(
    micro_batches: Sequence[T], ranks: MicroBatchRanks | None, together: bool, least: int = 0
) -> Iterator[T | None]:
    """Yield this rank's micro-batches in turn; None when it computes another's, or an empty one.

    Of ranks that compute micro-batches together, one has its turn at a time, so that no device
    holds the activations of more than one micro-batch.

    Args:
        micro_batches: this rank's micro-batches.
        ranks: the ranks that compute micro-batches together; None: this one computes alone.
        together: whether all ranks of the run take equally many rounds.
        least: minimum number of rounds.
    """
    rounds = max(len(micro_batches), least)
    if together:
        rounds = int(all_reduce_max(rounds))
    for position in range(rounds):
        for turn in range(1 if ranks is None else ranks.size):
            is_own_turn = ranks is None or turn == ranks.index
            yield micro_batches[position] if is_own_turn and position < len(micro_batches) else None
