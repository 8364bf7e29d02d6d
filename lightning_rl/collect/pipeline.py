"""From prompts to graded rollouts: what an iteration does before any learning."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from lightning_rl.collect.agents import Agent
from lightning_rl.collect.collector import Collector, run_async
from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.stages import StageClock


@dataclass
class RolloutPipeline:
    """Generate, decode and grade; needs no Trainer, so a script of your own can use it.

    ``seed`` is what every request's own seed is derived from; ``clock`` times the stages.
    """

    engine: Engine
    agent: Agent
    collector: Collector
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    clock: StageClock = field(default_factory=StageClock)
    generate_seconds: float = 0.0

    def run(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, iteration: int
    ) -> list[Rollout]:
        """``group_size`` graded rollouts of every prompt, group by group.

        ``generate_seconds`` then holds the time that generation took.

        Raises:
            EngineError: if the engine is not ready, or fails.
            RewardError: if too large a share could not be graded.
        """
        self.engine.require_ready()
        begin = time.perf_counter()
        with self.clock("generate"):
            rollouts = self.collector.collect(
                prompts, group_size, self.agent, self.engine, sampling, self.seed, iteration
            )
        self.generate_seconds = time.perf_counter() - begin
        self._decode(rollouts)
        groups = [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        with self.clock("reward"):
            run_async(self.rewards.grade(groups))
        return rollouts

    def _decode(self, rollouts: list[Rollout]) -> None:
        token_ids = [rollout.token_ids for rollout in rollouts]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            # A chat prompt gets a chat completion, as in TRL.
            chat = not isinstance(rollout.prompt.prompt, str)
            rollout.completion = [{"role": "assistant", "content": text}] if chat else text
