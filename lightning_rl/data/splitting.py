"""Splits a packed batch into minibatches, one per step, and micro-batches, one per forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import host_of
from lightning_rl.errors import ConfigError
from lightning_rl.run.processes.dist import gather, rank, world_size


def split_minibatches(batch: TensorDict, count: int, generator: torch.Generator) -> list[Tensor]:
    """Deal whole groups at random into ``count`` minibatches of rollout indices.

    All ranks call this together, with generators in the same state, and deal the groups of all
    ranks as one process would. A rank may therefore have more of its groups in one minibatch than
    in another, or none.

    Raises:
        ConfigError: if there are fewer groups than minibatches.
    """
    group = batch["rollouts", "group"].cpu()
    if count == 1:
        return [torch.arange(len(group), device="cpu")]
    # Ranks take turns with the groups of an iteration, and that gives each its place.
    index = group * world_size() + rank()
    places = sorted(chain.from_iterable(gather(index.unique().tolist())))
    if len(places) < count:
        raise ConfigError(
            f"minibatches={count} exceeds the {len(places)} groups of this batch; "
            "lower minibatches or raise groups_per_iteration"
        )
    parts = deal_groups(torch.tensor(places, device="cpu"), count, generator)
    return [torch.isin(index, part).nonzero().squeeze(1) for part in parts]


def deal_groups(places: Tensor, count: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Deal groups, given by their places, at random into ``count`` minibatches, as evenly as
    possible.
    """
    if count == 1:
        return [places]
    order = places[torch.randperm(len(places), generator=generator, device="cpu")]
    return order.tensor_split(count)


class Filling(ABC):
    """Decides which rollouts share a micro-batch, and how many tokens a model computes for them."""

    def order(self, rollouts: TensorDict) -> list[int]:
        """Return indices of rollouts, longest first, so that neighbours fit together."""
        length = rollouts["length"].tolist()
        return sorted(range(len(length)), key=lambda i: -length[i])

    @abstractmethod
    def filled(self, rollouts: TensorDict, order: list[int], budget: int) -> list[list[int]]:
        """Fill micro-batches in turn, each until the next rollout would exceed the budget."""

    @abstractmethod
    def tokens(self, rollouts: TensorDict) -> int:
        """Return how many tokens of the budget a micro-batch of these rollouts takes."""


class SharedPrompts(Filling):
    """Packs rollouts, computing a prompt that they share only once."""

    def order(self, rollouts: TensorDict) -> list[int]:
        length, prefix = (rollouts[name].tolist() for name in ("length", "prefix"))
        longest: dict[int, int] = {}
        for p, n in zip(prefix, length, strict=True):
            longest[p] = max(longest.get(p, 0), n)
        # Rollouts with one prompt stay neighbours.
        return sorted(
            range(len(length)), key=lambda i: (-longest[prefix[i]], prefix[i], -length[i])
        )

    def filled(self, rollouts: TensorDict, order: list[int], budget: int) -> list[list[int]]:
        length, prompt_length, prefix = (
            rollouts[name].tolist() for name in ("length", "prompt_length", "prefix")
        )
        micro_batches: list[list[int]] = []
        used, seen = budget, set[int]()
        for i in order:
            suffix = length[i] - prompt_length[i]
            cost = suffix if prefix[i] in seen else length[i]
            if used + cost > budget:
                micro_batches.append([])
                used, seen, cost = 0, set(), length[i]
            micro_batches[-1].append(i)
            seen.add(prefix[i])
            used += cost
        return micro_batches

    def tokens(self, rollouts: TensorDict) -> int:
        prefix, prompt = (rollouts[name].tolist() for name in ("prefix", "prompt_length"))
        shared = dict(zip(prefix, prompt, strict=True))
        written = int((rollouts["length"] - rollouts["prompt_length"]).sum())
        return written + sum(shared.values())


class PaddedLines(Filling):
    """Puts each rollout with its prompt on one line, padded to the longest of its micro-batch."""

    def filled(self, rollouts: TensorDict, order: list[int], budget: int) -> list[list[int]]:
        length = rollouts["length"].tolist()
        micro_batches: list[list[int]] = []
        longest = real = 0
        for i in order:
            real += length[i]
            count = len(micro_batches[-1]) + 1 if micro_batches else 0
            if not micro_batches or count * longest > min(budget, (1 + MAX_PADDING) * real):
                micro_batches.append([])
                longest = real = length[i]
            micro_batches[-1].append(i)
        return micro_batches

    def tokens(self, rollouts: TensorDict) -> int:
        return len(rollouts) * int(rollouts["length"].max())


SHARED, PADDED = SharedPrompts(), PaddedLines()
MAX_PADDING = 0.3
"""The largest share of padding, relative to a micro-batch's own tokens, before the next begins."""


def split_micro_batches(
    batch: TensorDict, max_tokens: int, even: bool = True, filling: Filling = SHARED
) -> list[Tensor]:
    """Cut a batch into micro-batches of at most ``max_tokens`` forward tokens, as rollout indices.

    There are as few micro-batches as filling one after another gives. If ``even``, they are about
    equally full, which lowers peak memory and leaves no small micro-batch that keeps a GPU idle.
    Longer rollouts come first, so that neighbours have similar lengths. ``filling`` decides how
    tokens are counted: by default a shared prompt counts once per micro-batch. A rollout longer
    than the budget gets its own micro-batch.
    """
    rollouts = host_of(batch)["rollouts"]
    order = filling.order(rollouts)
    micro_batches, too_low = filling.filled(rollouts, order, max_tokens), 0
    while even and max_tokens - too_low > 1 + max_tokens // 64:
        budget = (max_tokens + too_low) // 2
        tried = filling.filled(rollouts, order, budget)
        if len(tried) == len(micro_batches):
            micro_batches, max_tokens = tried, budget
        else:
            too_low = budget
    return [torch.tensor(sorted(micro_batch), device="cpu") for micro_batch in micro_batches]
