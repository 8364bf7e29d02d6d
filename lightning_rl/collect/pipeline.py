"""From prompts to graded rollouts: what an iteration does before any learning."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent
from lightning_rl.collect.collector import Collector, new_rollouts, run_async
from lightning_rl.collect.filters import GroupFilter
from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.errors import FilterError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from lightning_rl.stages import StageClock


@dataclass
class Collection:
    """One iteration's rollouts: all that were generated, and those that the filters kept."""

    generated: list[Rollout] = field(default_factory=list)
    kept: list[Rollout] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, group: list[Rollout], filters: Sequence[GroupFilter]) -> None:
        """Keep a group, or mark its rollouts SKIPPED and note which filter rejected it."""
        self.generated += group
        for group_filter in filters:
            if not group_filter.keep(group):
                self.rejected[type(group_filter).__name__] += 1
                for rollout in group:
                    if rollout.status is RolloutStatus.COMPLETED:
                        rollout.status = RolloutStatus.SKIPPED
                return
        self.kept += group

    def metrics(self) -> dict[str, float]:
        """Groups that each filter rejected."""
        return {f"filter/{name}": float(count) for name, count in self.rejected.items()}

    def tell(self) -> str:
        """The same in words."""
        parts = (f"{name} rejected {count}" for name, count in self.rejected.items())
        return ", ".join(parts) or "none was rejected"


def in_groups(rollouts: list[Rollout], group_size: int) -> list[list[Rollout]]:
    """Cut group by group."""
    return [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]


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

    def collect_kept(
        self,
        draw: Callable[[int], list[Prompt]],
        num_groups: int,
        group_size: int,
        sampling: Sampling,
        iteration: int,
        filters: Sequence[GroupFilter] = (),
        max_rounds: int = 1,
    ) -> "Collection":
        """Collect ``num_groups`` groups that all ``filters`` keep (DAPO's dynamic sampling).

        Rejected groups are replaced by groups of prompts drawn anew, in at most ``max_rounds``
        rounds of generation.

        Raises:
            FilterError: if fewer groups than ``num_groups`` were kept by then.
        """
        collection = Collection()
        for _ in range(max_rounds):
            missing = num_groups - len(collection.kept) // group_size
            if missing == 0:
                break
            first_place = len(collection.generated) // group_size
            rollouts = self.run(draw(missing), group_size, sampling, iteration, first_place)
            collection.seconds += self.generate_seconds
            for group in in_groups(rollouts, group_size):
                collection.add(group, filters)
        kept = len(collection.kept) // group_size
        if kept < num_groups:
            raise FilterError(
                f"after {max_rounds} rounds only {kept} of groups_per_iteration={num_groups} "
                f"groups passed the filters ({collection.tell()}): the prompts are exhausted, too "
                "easy or too hard; raise max_rounds, change the prompts, or drop the filter"
            )
        return collection

    def run(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        iteration: int,
        first_place: int = 0,
    ) -> list[Rollout]:
        """``group_size`` graded rollouts of every prompt, group by group.

        ``generate_seconds`` then holds the time that generation took. ``first_place`` numbers the
        groups, so that ids and seeds stay apart where an iteration generates more than once.

        Raises:
            EngineError: if the engine is not ready, or fails.
            RewardError: if too large a share could not be graded.
        """
        self.engine.require_ready()
        begin = time.perf_counter()
        with self.clock("generate"):
            rollouts = new_rollouts(
                prompts, group_size, sampling, self.seed, iteration, first_place
            )
            rollouts = self.collector.collect(rollouts, self.agent, self.engine, sampling)
        self.generate_seconds = time.perf_counter() - begin
        self._decode(rollouts)
        with self.clock("reward"):
            run_async(self.rewards.grade(in_groups(rollouts, group_size)))
        return rollouts

    def _decode(self, rollouts: list[Rollout]) -> None:
        """Set ``completion``, unless the agent did (it knows which tokens are whose message)."""
        rollouts = [rollout for rollout in rollouts if not rollout.completion]
        token_ids = [rollout.token_ids for rollout in rollouts]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            # A chat prompt gets a chat completion, as in TRL.
            chat = not isinstance(rollout.prompt.prompt, str)
            rollout.completion = [{"role": "assistant", "content": text}] if chat else text
