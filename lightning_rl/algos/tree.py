"""Credit in a tree of calls: the rollouts of a group, and the branches that fork off them."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import ClassVar

from tensordict import TensorDict

from lightning_rl.algos.advantages import Episodes, WithinGroups, episodes_of, on_tokens
from lightning_rl.config.arguments import configurable
from lightning_rl.data.episodes import call_numbers, calls_of


@dataclass
class Branched:
    """A rollout and its branches, by their numbers.

    ``trunk`` is the rollout itself, None if it is missing (e.g. could not be graded); ``forks``
    are the branches, by the number of calls they share with it.
    """

    trunk: int | None = None
    forks: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def worths(self, rewards: Sequence[float]) -> dict[int, float]:
        """Return the value of the trunk's continuation at each fork; 0 is the prompt."""
        found, worth = {}, None if self.trunk is None else rewards[self.trunk]
        for fork in sorted(self.forks, reverse=True):
            going_on = [rewards[branch] for branch in self.forks[fork]]
            if worth is not None:
                found[fork] = worth
                going_on.append(worth)
            worth = fsum(going_on) / len(going_on)
        assert worth is not None
        return found | {0: worth}


Credit = list[tuple[int, float]]
"""Calls, ascending, each with the advantage that holds from it on."""


def tree_credits(group: Sequence[Branched], rewards: Sequence[float]) -> dict[int | None, Credit]:
    """Return the credit of a group's rollouts and branches, by their numbers.

    ``rewards`` are indexed by these numbers; see :class:`TreeRLOO`. The credit of missing trunks is
    under None.
    """
    result: defaultdict[int | None, Credit] = defaultdict(list)
    worths = [one.worths(rewards) for one in group]
    gains = _less_the_others([worth[0] for worth in worths])
    for one, worth, gain in zip(group, worths, gains, strict=True):
        weight = 1.0
        result[one.trunk].append((0, gain))
        for fork, branches in sorted(one.forks.items()):
            ways: dict[int | None, float] = {branch: rewards[branch] for branch in branches}
            if fork in worth:
                ways[one.trunk] = worth[fork]
            weight /= len(ways)
            for number, more in zip(ways, _less_the_others([*ways.values()]), strict=True):
                result[number].append((fork, weight * more))
    return result


def _less_the_others(values: Sequence[float]) -> list[float]:
    """Return each value minus the mean of all others; 0 for a single value."""
    total, others = fsum(values), len(values) - 1
    if not others:
        return [0.0]
    # From the mean of all, so that of values that are all alike nothing is left of rounding.
    mean = total / len(values)
    return [(value - mean) * len(values) / others for value in values]


@configurable
@dataclass(frozen=True)
class TreeRLOO(WithinGroups):
    """Leave-one-out at every fork: the value of a continuation minus the mean of the others.

    Where rollouts branch (:class:`Branching`), the calls of a group are a tree. Its root is the
    prompt, from which each rollout of the group continues; at a fork the branches and the rollout
    itself continue. The value of each continuation is estimated: a branch's is its reward; the
    rollout's own is the mean of all at its next fork, or its reward if no fork follows. All calls
    up to the next fork get the value of their continuation minus the mean of the others at their
    fork. An advantage is thus the Monte-Carlo difference of values after and before, as in VinePPO
    (Kazemnejad et al. 2024, arXiv 2410.01679, section 4); but continuations are trained on as well,
    and a continuation is compared only with others, as in :class:`RLOO`, which keeps the gradient
    unbiased. Without branches it is RLOO.

    All continuations at a fork share the weight of one equally, so that no call counts more because
    more continuations were tried there: advantages are divided by the number of continuations at
    each fork on the way. Aggregations count branches as rollouts: with ``TokenSum`` the gradient is
    that of the expected reward times rollouts / (rollouts + branches), which is a constant only if
    the number of branches does not depend on what was written.
    """

    takes_kl_reward: ClassVar[bool] = False
    takes_branches: ClassVar[bool] = True

    def __call__(self, batch: TensorDict) -> TensorDict:
        episodes, calls = episodes_of(batch), calls_of(batch)
        rewards = episodes.reward.double().tolist()
        credited: dict[int | None, Credit] = {}
        for group in _groups(batch, episodes):
            credited |= tree_credits(group, rewards)
        numbers = calls.place
        if "call" in batch["tokens"]:  # then those without loss count, too
            numbers = call_numbers(batch)[calls.tokens[calls.first]]
        of_call = [
            _at(credited[episode], number)
            for episode, number in zip(calls.episode.tolist(), numbers.tolist(), strict=True)
        ]
        advantages = episodes.reward.new_tensor(of_call)
        batch["tokens", "advantages"] = on_tokens(batch, calls, advantages[calls.of_token])
        return batch


def _groups(batch: TensorDict, episodes: Episodes) -> list[list[Branched]]:
    """Return the trees of a batch: for each group, one per rollout from the prompt."""
    rollouts, numbers = batch["rollouts"], range(len(episodes.reward))
    columns = [list(numbers), [0] * len(numbers)]  # each for itself, without forks
    if "fork" in rollouts:
        empty = episodes.of_row.new_zeros(len(numbers))
        columns = [
            empty.index_put((episodes.of_row,), rollouts[name]).tolist()
            for name in ("sample", "fork")
        ]
    groups: defaultdict[int, defaultdict[int, Branched]]
    groups = defaultdict(lambda: defaultdict(Branched))
    columns_by_row = zip(numbers, episodes.group.tolist(), *columns, strict=True)
    for number, group, sample, fork in columns_by_row:
        one = groups[group][sample]
        if fork:
            one.forks[fork].append(number)
        else:
            one.trunk = number
    return [list(group.values()) for group in groups.values()]


def _at(credit: Credit, call: int) -> float:
    """Return the advantage of a call; a branch has none before its fork."""
    return credit[max(0, bisect_right(credit, call, key=lambda part: part[0]) - 1)][1]
