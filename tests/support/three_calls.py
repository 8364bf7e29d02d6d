"""Provide an agent whose rollouts have several rows, as those of agent programs do."""

import asyncio
import random
from dataclasses import replace

from lightning_rl.extend import Agent, Episode
from lightning_rl.rollout import Rollout, Row


class ThreeCalls(Agent):
    """A call, one that goes on from it, and one that only knows the end of what was said.

    Between them it waits for up to ``pause`` seconds, by the seed.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause

    async def run(self, rollout, engine, sampling):
        episode, own = Episode(rollout), rollout.prompt.token_ids
        _, first = await episode.call(engine, own, sampling)
        await self._wait(rollout, 1)
        _, second = await episode.call(engine, [*own, *first.token_ids, 2, 5], sampling)
        await self._wait(rollout, 2)
        short = [*own, 2, *second.token_ids[:2]]
        await episode.call(engine, short, replace(sampling, temperature=0.8), "critic")
        episode.end()
        return rollout

    async def _wait(self, rollout, call: int) -> None:
        await asyncio.sleep(self.pause * random.Random(rollout.seed + call).random())


def cut_in_two(rollout: Rollout) -> Rollout:
    """Cut the same tokens in two rows, of which the second goes on from the first."""
    [row] = rollout.rows
    half = len(row.token_ids) // 2
    columns = row.token_ids, row.loss_mask, row.logprobs, row.versions
    first = Row(row.prompt_ids, *(column[:half] for column in columns))
    second = Row(row.prompt_ids + row.token_ids[:half], *(column[half:] for column in columns))
    return replace(rollout, rows=[first, second])
