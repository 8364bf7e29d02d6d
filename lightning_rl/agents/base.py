"""Agents: how one rollout comes about from a prompt and an engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.rollout import Rollout, RolloutStatus


class Agent(ABC):
    """Fills a rollout's tokens by talking to an engine.

    One object runs many rollouts at the same time: keep a rollout's state in ``run``'s own
    variables, or in the rollout.

    ``chat_options``: further variables for the tokenizer's chat template when it renders prompts.
    """

    chat_options: Mapping[str, Any] = {}

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called once, before the first rollout; what encodes or decodes text keeps it.

        Raises:
            ConfigError: if the agent cannot work with this tokenizer or its chat template.
        """

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
