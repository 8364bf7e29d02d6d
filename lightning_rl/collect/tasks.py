"""Task: the agent, sampling and rewards that a set of prompts gets."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_rl.agents.base import Agent, new_rollouts
from lightning_rl.collect.mixture import Mixture, PromptSet, naming
from lightning_rl.data.plans import GroupPlan
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.by_set import RewardsBySet
from lightning_rl.rollout import Group


@dataclass(frozen=True)
class Task:
    """The agent, sampling and rewards of one set of prompts.

    ``name`` is the set's name, or empty if there is a single set. Each prompt gets ``group_size``
    rollouts, and a rollout with a reward of at least ``success_reward`` is correct.
    """

    name: str
    prompts: PromptDataset
    agent: Agent
    rewards: Rewards
    sampling: Sampling
    group_size: int
    success_reward: float
    plan: GroupPlan = field(default_factory=GroupPlan)

    def room_within(self, max_length: int) -> int:
        """Return how many tokens a prompt may have if it shares ``max_length`` with a completion.

        Raises:
            ConfigError: naming the prompt set, if its completions leave no room.
        """
        room = max_length - self.sampling.max_tokens
        if room < 1:
            with naming(self.name):
                raise ConfigError(
                    f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt "
                    f"within the engine's {max_length} tokens; lower it or raise "
                    "engine.max_model_len"
                )
        return room

    def new_groups(self, limit: int | None, seed: int, iteration: int) -> list[Group]:
        """Return empty groups of the first ``limit`` prompts (None: all).

        Their seeds do not depend on the other sets.

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
                index,
            )
            for index, prompt in enumerate(self.prompts.first(limit))
        ]
        if not groups:
            raise DataError(
                f"{self.prompts!r}: all of its {len(self.prompts)} prompts are too long; raise its "
                "max_prompt_tokens or engine.max_model_len, or lower sampling.max_tokens"
            )
        return groups


def tasks_of(
    prompts: PromptDataset,
    agent: Agent,
    plan: GroupPlan,
    rewards: Rewards | None,
    sampling: Sampling,
    group_size: int,
    success_reward: float,
) -> list[Task]:
    """Return one task per set of a :class:`Mixture`, or one task for any other data set.

    The other arguments are the defaults for whatever a set leaves open.

    Raises:
        ConfigError: if a set has no rewards.
    """
    if not isinstance(prompts, Mixture):
        if rewards is None:
            raise ConfigError(
                "RLDataModule.rewards: is missing; name at least one reward function (only sets "
                "of a Mixture may have their own)"
            )
        return [Task("", prompts, agent, rewards, sampling, group_size, success_reward, plan)]
    return [
        Task(
            one.name,
            one.prompts,
            agent if one.agent is None else one.agent,
            _rewards_of(one, rewards),
            one.sampling or sampling,
            one.group_size or group_size,
            success_reward if one.success_reward is None else one.success_reward,
            plan if one.plan is None else one.plan,
        )
        for one in prompts.sets
    ]


def _rewards_of(one: PromptSet, common: Rewards | None) -> Rewards:
    result = one.grader or common
    if result is None:
        raise ConfigError(
            f"prompt set {one.name!r} has no rewards; set its rewards, or data.rewards for all "
            "sets without their own"
        )
    return result


def grader_of(tasks: Sequence[Task]) -> Rewards | RewardsBySet:
    """Return the grader of the rollouts of all tasks."""
    if not tasks[0].name:
        return tasks[0].rewards
    return RewardsBySet({task.name: task.rewards for task in tasks})
