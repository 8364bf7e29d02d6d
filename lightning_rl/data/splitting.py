"""Which rows of a packed batch go together: minibatches, a step each, and packs, a pass each."""

from collections.abc import Sequence
from itertools import chain

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.batch import host_of
from lightning_rl.errors import ConfigError
from lightning_rl.run.dist import gather, rank, world_size


def split_minibatches(batch: TensorDict, count: int, generator: torch.Generator) -> list[Tensor]:
    """Deal whole groups at random into ``count`` minibatches of rollout indices.

    Several ranks, which call it together with generators in one state, deal the groups of all of
    them, as one process would: so a rank may have more of its groups in one minibatch than in
    another, or none.

    Raises:
        ConfigError: if there are fewer groups than minibatches.
    """
    group = batch["rollouts", "group"].cpu()
    if count == 1:
        return [torch.arange(len(group), device="cpu")]
    # Ranks take turns with the groups of an iteration, and that gives each its place.
    place = group * world_size() + rank()
    places = sorted(chain.from_iterable(gather(place.unique().tolist())))
    if len(places) < count:
        raise ConfigError(
            f"minibatches={count} exceeds the {len(places)} groups of this batch; "
            "lower minibatches or raise groups_per_iteration"
        )
    parts = deal_groups(torch.tensor(places, device="cpu"), count, generator)
    return [torch.isin(place, part).nonzero().squeeze(1) for part in parts]


def deal_groups(places: Tensor, count: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Deal the places of groups at random into ``count`` minibatches, as evenly as can be."""
    if count == 1:
        return [places]
    order = places[torch.randperm(len(places), generator=generator, device="cpu")]
    return order.tensor_split(count)


def split_packs(batch: TensorDict, max_tokens: int, even: bool = True) -> list[Tensor]:
    """Cut a batch into packs of at most ``max_tokens`` forward tokens, as rollout indices.

    There are as few packs as filling one after another gives. If ``even``, they are about equally
    full: the peak is lower, and no small pack leaves a GPU idle. A shared prompt is counted once
    per pack. Longer rollouts come first, so that neighbours have like lengths; rollouts with one
    prompt stay neighbours. A rollout longer than the budget gets a pack of its own.
    """
    rollouts = host_of(batch)["rollouts"]
    length, prompt_length, prefix = (
        rollouts[name].tolist() for name in ("length", "prompt_length", "prefix")
    )
    longest: dict[int, int] = {}
    for p, n in zip(prefix, length, strict=True):
        longest[p] = max(longest.get(p, 0), n)
    order = sorted(range(len(length)), key=lambda i: (-longest[prefix[i]], prefix[i], -length[i]))

    def filled(budget: int) -> list[list[int]]:
        """One pack after another, each until the next rollout would not fit."""
        packs: list[list[int]] = []
        used, seen = budget, set[int]()
        for i in order:
            suffix = length[i] - prompt_length[i]
            cost = suffix if prefix[i] in seen else length[i]
            if used + cost > budget:
                packs.append([])
                used, seen, cost = 0, set(), length[i]
            packs[-1].append(i)
            seen.add(prefix[i])
            used += cost
        return packs

    packs, too_low = filled(max_tokens), 0
    while even and max_tokens - too_low > 1 + max_tokens // 64:
        budget = (max_tokens + too_low) // 2
        tried = filled(budget)
        if len(tried) == len(packs):
            packs, max_tokens = tried, budget
        else:
            too_low = budget
    return [torch.tensor(sorted(pack), device="cpu") for pack in packs]
