"""Collecting on several ranks: each with an engine of its own, or rank 0 for all of them."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_rl import dist
from lightning_rl.collect.batches import Collection, RolloutBatches
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.rollout import Group, Prompt


def feeds(engine: Engine) -> bool:
    """Whether this rank gives work and weights to the engine."""
    return dist.rank() == 0 or not engine.serves_all_ranks


def collect_share(batches: RolloutBatches, iteration: int) -> Collection:
    """This rank's share of an iteration's groups; what fails on one rank fails on all."""
    engine = batches.pipeline.engine
    with dist.every_rank():
        collection = batches.collect(iteration) if feeds(engine) else Collection()
    if engine.serves_all_ranks:
        collection.kept = dist.deal(collection.kept)
        return collection
    # Filters make ranks draw more or fewer prompts. A curriculum needs all to go on from one place.
    batches.catch_up(int(dist.largest(batches.source.drawn)))
    return collection


def complete_together(
    pipeline: RolloutPipeline, groups: Sequence[Group], sampling: Sampling
) -> list[Group]:
    """Generate and grade groups that all ranks have, sharing the work; all get all of them."""
    engine = pipeline.engine
    if engine.serves_all_ranks:
        share = list(groups) if feeds(engine) else []
    else:
        share = dist.mine(groups)
    with dist.every_rank():
        if feeds(engine):
            pipeline.complete(share, sampling)
    return dist.interleaved(dist.gather(share))


def of_all_ranks(groups: list[Group]) -> list[Group]:
    """Every rank's groups in the order of their places, as statistics need them.

    On several ranks without logprobs, and of prompts only the id: less to send.
    """
    if dist.world_size() == 1:
        return groups
    light = [
        [replace(r, prompt=Prompt(r.prompt.id, "", []), logprobs=[]) for r in group]
        for group in groups
    ]
    return dist.interleaved(dist.gather(light))
