"""Agents: how one rollout comes about from a prompt and an engine."""

from abc import ABC, abstractmethod

from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.rollout import Rollout, RolloutStatus


class Agent(ABC):
    """Fills a rollout's tokens by talking to an engine."""

    @abstractmethod
    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        """Extend ``rollout`` in place until it is completed or aborted, and return it."""


class SingleTurn(Agent):
    """One prompt, one completion."""

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        completion = await engine.generate(rollout.prompt.token_ids, sampling, rollout.seed)
        rollout.token_ids += completion.token_ids
        rollout.loss_mask += [True] * len(completion.token_ids)
        rollout.logprobs += completion.logprobs
        rollout.versions += completion.versions
        rollout.finish_reason = completion.finish_reason
        aborted = completion.finish_reason == "abort" or not completion.token_ids
        rollout.status = RolloutStatus.ABORTED if aborted else RolloutStatus.COMPLETED
        return rollout
