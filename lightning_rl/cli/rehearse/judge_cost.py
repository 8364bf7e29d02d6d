"""Counts what a run asks of services that grade: calls, tokens and, given prices, money."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_rl.cli.rehearse.findings import Kind, RunFinding
from lightning_rl.collect.tasks import Task
from lightning_rl.rewards.calling import AsksService
from lightning_rl.rollout import Prompt


class Prices(NamedTuple):
    """Prices of a million tokens, in any currency: those that a judge reads, and writes."""

    read: float
    written: float


def judge_costs(
    task: Task, prompts: Sequence[Prompt], tokenizer: Any, groups: float, prices: Prices | None
) -> Iterator[RunFinding]:
    """Yield, for each reward of a task that asks a service, what it is asked for in a run.

    Args:
        task: whose rewards they are.
        prompts: its prompts.
        tokenizer: the policy's, by which a judge's tokens are counted too.
        groups: the number of its groups in a run.
        prices: of a million tokens; None: unknown.
    """
    asked = sum(len(prompt.token_ids) for prompt in prompts) / max(1, len(prompts))
    rewards: dict[str, Any] = task.rewards.functions
    for name, function in rewards.items():
        if not isinstance(function, AsksService):
            continue
        used = function.usage(tokenizer, asked, task.sampling.max_tokens, task.group_size)
        text = f"{name} asks a service {groups * used.requests:,.0f} times in a run"
        if used.read is not None and used.written is not None:
            read, written = groups * used.read, groups * used.written
            text += f", which reads {read:.2g} tokens and writes {written:.2g} at most"
            if prices is not None:
                cost = (read * prices.read + written * prices.written) / 1e6
                text += f": {cost:,.2f} at {prices.read:g} and {prices.written:g} a million"
        yield RunFinding(Kind.TRIED, "data.rewards", text)
