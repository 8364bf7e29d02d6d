"""What becomes of the prompts of a run, set by set: who answers, how, and who grades."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_rl.agents.base import Agent, new_rollouts
from lightning_rl.collect.mixture import Mixture, PromptSet
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.by_set import RewardsBySet
from lightning_rl.rollout import Group


@dataclass(frozen=True)
class Task:
    """What becomes of prompts: who answers, how, and who grades.

    ``name`` is the set's, or empty where there is only one; ``group_size`` rollouts are made of a
    prompt, and one with ``success_reward`` is right.
    """

    name: str
    prompts: PromptDataset
    agent: Agent
    rewards: Rewards
    sampling: Sampling
    group_size: int
    success_reward: float

    def new_groups(self, limit: int | None, seed: int, iteration: int) -> list[Group]:
        """Empty groups of the first ``limit`` prompts (all for None), with seeds that do not depend
        on which other sets there are.

        Raises:
            DataError: if no prompt is short enough.
        """
        groups = [
            new_rollouts(
                [replace(prompt, set=self.name)],
                self.group_size,
                self.sampling,
                seed,
                iteration,
                place,
            )
            for place, prompt in enumerate(self.prompts.first(limit))
        ]
        if not groups:
            raise DataError(
                f"{self.prompts!r}: none of {len(self.prompts)} prompts is short enough; raise its "
                "max_prompt_tokens or engine.max_model_len, or lower sampling.max_tokens"
            )
        return groups


def tasks_of(
    prompts: PromptDataset,
    agent: Agent,
    rewards: Rewards | None,
    sampling: Sampling,
    group_size: int,
    success_reward: float,
) -> list[Task]:
    """One task per set of a :class:`Mixture`, of another data set one; what a set leaves open, the
    other arguments say.

    Raises:
        ConfigError: if nothing would grade a set.
    """
    if not isinstance(prompts, Mixture):
        if rewards is None:
            raise ConfigError(
                "RLDataModule.rewards: is missing; name at least one reward function (only the "
                "sets of a Mixture may have their own)"
            )
        return [Task("", prompts, agent, rewards, sampling, group_size, success_reward)]
    return [
        Task(
            one.name,
            one.prompts,
            agent if one.agent is None else one.agent,
            _rewards_of(one, rewards),
            one.sampling or sampling,
            one.group_size or group_size,
            success_reward if one.success_reward is None else one.success_reward,
        )
        for one in prompts.sets
    ]


def _rewards_of(one: PromptSet, common: Rewards | None) -> Rewards:
    found = one.grader or common
    if found is None:
        raise ConfigError(
            f"nothing grades prompt set {one.name!r}; give it rewards, or set data.rewards for all "
            "sets without their own"
        )
    return found


def grader_of(tasks: Sequence[Task]) -> Rewards | RewardsBySet:
    """What grades the rollouts of all tasks."""
    if not tasks[0].name:
        return tasks[0].rewards
    return RewardsBySet({task.name: task.rewards for task in tasks})


def by_name(tasks: Sequence[Task]) -> dict[str, Task]:
    """Tasks by the set of the prompts that they are for."""
    return {task.name: task for task in tasks if task.name}
