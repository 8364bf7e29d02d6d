"""Collectors: from prompts to groups of rollouts."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from lightning_rl.agents.base import Agent
from lightning_rl.engines.base import Engine, Sampling, request_seed
from lightning_rl.rollout import Prompt, Rollout

T = TypeVar("T")


class Collector(ABC):
    """Decides when which rollout is generated."""

    @abstractmethod
    def collect(
        self, rollouts: list[Rollout], agent: Agent, engine: Engine, sampling: Sampling
    ) -> list[Rollout]:
        """Let the agent fill all ``rollouts``, and return them in their order.

        Raises:
            EngineError: if the engine fails.
        """


class SyncCollector(Collector):
    """Generates the whole batch, and returns when its last rollout is done.

    Args:
        max_concurrency: rollouts in flight at most; None: all (the engine queues them).
    """

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency

    def collect(
        self, rollouts: list[Rollout], agent: Agent, engine: Engine, sampling: Sampling
    ) -> list[Rollout]:
        return run_async(self._run_all(rollouts, agent, engine, sampling))

    async def _run_all(
        self, rollouts: list[Rollout], agent: Agent, engine: Engine, sampling: Sampling
    ) -> list[Rollout]:
        gate = asyncio.Semaphore(self.max_concurrency or max(1, len(rollouts)))

        async def run(rollout: Rollout) -> Rollout:
            async with gate:
                return await agent.run(rollout, engine, sampling)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(rollout)) for rollout in rollouts]
        return [task.result() for task in running]


def new_rollouts(
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
    iteration: int,
    first_place: int = 0,
) -> list[Rollout]:
    """Empty rollouts, each with the seed that lets it be generated again.

    ``first_place`` is the number of groups that the iteration has generated before.
    """
    return [
        Rollout(
            prompt=prompt,
            # A prompt drawn twice in one iteration makes two groups: tell them apart by place.
            group_id=f"{iteration}/{place}/{prompt.id}",
            sample_index=index,
            seed=request_seed(seed, f"{place}/{prompt.id}", index, iteration),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        for place, prompt in enumerate(prompts, first_place)
        for index in range(group_size)
    ]


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also from a notebook, whose own event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unwrapped(coroutine)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(_unwrapped(coroutine))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _unwrapped(coroutine: Coroutine[Any, Any, T]) -> T:
    """Raise what went wrong, not the group that tasks wrap it in."""
    try:
        return asyncio.run(coroutine)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
