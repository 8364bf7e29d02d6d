"""How a configuration splits prompts into batches, and the largest batch that can occur."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil

import torch
from tensordict import TensorDict

from lightning_rl.data.batch import select
from lightning_rl.data.splitting import SHARED, Filling, split_micro_batches, split_minibatches
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, SamplingDistribution

PLAIN = SamplingDistribution()


@dataclass(frozen=True)
class BatchPlan:
    """The sizes from prompts to optimizer steps. Tokens and micro-batches are upper bounds.

    ``micro_batch_tokens`` are the forward tokens of the largest micro-batch, on each of ``ranks``
    processes, and ``micro_batches`` is the number into which a minibatch is cut there; a prompt
    that rollouts share counts once. The policy learns in the iterations of its ``schedule``.
    """

    prompts: int
    groups: int  # per iteration, on all ranks
    group_size: int
    ranks: int
    tokens: int
    minibatches: int
    ppo_epochs: int
    micro_batches: int
    micro_batch_tokens: int
    iterations_per_epoch: int
    epochs: int | None
    schedule: UpdateSchedule = EveryIteration()

    @property
    def rollouts(self) -> int:
        """Rollouts per iteration, on all ranks."""
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
        """Return the number of iterations in the first ``epochs`` epochs in which the policy
        learns.
        """
        return self.schedule.count(epochs * self.iterations_per_epoch)

    def lines(self) -> Iterator[str]:
        """Yield lines of text for the user."""
        yield (
            f"{self.groups} prompts x group_size {self.group_size} = {self.rollouts} rollouts "
            f"per iteration, at most {self.tokens:,} tokens"
        )
        ranks = f"on each of {self.ranks} ranks " if self.ranks > 1 else ""
        size = largest_share(self.groups, self.ranks, self.minibatches)
        yield (
            f"{ranks}{_count(self.minibatches, 'minibatch')} of {size} groups or fewer, in "
            f"{_count(self.micro_batches, 'micro-batch')} of {self.micro_batch_tokens:,} tokens or "
            "fewer each"
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
    """Return the most groups of a minibatch that a rank may have: all, if it has as many."""
    return min(groups // ranks, ceil(groups / minibatches))


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def with_longest_whole(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """Return all prompts; only the ``count`` longest keep their pictures, as those of all may be
    many.
    """
    result: list[Prompt] = []
    whole: list[tuple[int, int]] = []  # a heap of lengths and places; of equals the last goes first
    for prompt in prompts:
        result.append(prompt)
        heapq.heappush(whole, (len(prompt.token_ids), -len(result)))
        if len(whole) > count:
            _, place = heapq.heappop(whole)
            result[-place - 1] = replace(result[-place - 1], pictures=[], places=[])
    return result


def largest_rollouts(
    prompts: Sequence[Prompt],
    groups: int,
    group_size: int,
    max_tokens: int,
    sampling: SamplingDistribution = PLAIN,
) -> list[Rollout]:
    """Rollouts of the ``groups`` longest prompts, with completions of ``max_tokens`` tokens."""
    longest = sorted(prompts, key=lambda p: len(p.token_ids), reverse=True)
    rollouts = []
    for group in range(groups):
        prompt = longest[group % len(longest)]
        for sample in range(group_size):
            # Any token will do: only lengths matter, and that prompts can be told apart.
            written = prompt.token_ids[-1:] * max_tokens
            rollout = Rollout(
                prompt, str(group), sample, 0, sampling, status=RolloutStatus.COMPLETED
            )
            rollout.rows[0].append_written(written, [0.0] * max_tokens, [0] * max_tokens)
            rollouts.append(rollout)
    return rollouts


def widest(all_of: Sequence[SamplingDistribution]) -> SamplingDistribution:
    """Combine all settings that any of the distributions uses: each transform of logits takes
    memory.
    """
    asked = {
        name: value
        for distribution in all_of
        for name, value in asdict(distribution).items()
        if value != getattr(PLAIN, name)
    }
    return SamplingDistribution(**asked)


def cut(
    batch: TensorDict, minibatches: int, max_tokens_per_micro_batch: int, filling: Filling = SHARED
) -> list[list[TensorDict]]:
    """Cut a batch into micro-batches, by minibatch, on one process, as full as can be."""
    generator = torch.Generator().manual_seed(0)
    parts = [select(batch, rows) for rows in split_minibatches(batch, minibatches, generator)]
    return [
        [
            select(part, rows)
            for rows in split_micro_batches(part, max_tokens_per_micro_batch, False, filling)
        ]
        for part in parts
    ]
