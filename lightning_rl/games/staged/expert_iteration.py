"""ExpertIteration: imitate the interactions with high rewards; and rules that select them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from lightning_rl.algos.schedules import Schedule, schedule_of
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.sampling import seed_of
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.games.protocols.base import ACCEPT, REJECT
from lightning_rl.games.staged.algorithm import StagedAlgorithm
from lightning_rl.games.staged.interaction import Interaction
from lightning_rl.games.staged.training_sets import Demonstrations, Example


class Selection(ABC):
    """Selects the interactions that an agent is to imitate."""

    @abstractmethod
    def choose(self, rewards: Sequence[float], rng: random.Random) -> list[int]:
        """Return the indices of the selected interactions; one may occur more than once.

        Args:
            rewards: the agent's reward in each interaction.
            rng: for random choices.
        """


@configurable
class RewardThreshold(Selection):
    """Selects all interactions whose reward is at least a threshold.

    Args:
        least: the threshold, inclusive.
    """

    def __init__(self, least: float = 0.9) -> None:
        require_finite(least=least)
        self.least = least

    def choose(self, rewards: Sequence[float], rng: random.Random) -> list[int]:
        return [index for index, reward in enumerate(rewards) if reward >= self.least]


@configurable
class RewardWeighted(Selection):
    """Draws as many as there are, with replacement, with probability proportional to r - lowest.

    If no reward is above the lowest, none is selected.

    Args:
        lowest: the reward that is never selected; None: the lowest of the given rewards.
    """

    def __init__(self, lowest: float | None = None) -> None:
        require_finite(lowest=lowest)
        self.lowest = lowest

    def choose(self, rewards: Sequence[float], rng: random.Random) -> list[int]:
        lowest = min(rewards, default=0.0) if self.lowest is None else self.lowest
        weights = [max(0.0, reward - lowest) for reward in rewards]
        if not any(weights):
            return []
        return rng.choices(range(len(rewards)), weights, k=len(rewards))


@configurable
class ExpertIteration(StagedAlgorithm):
    """Agents imitate their answers in interactions with high rewards (Anthony et al. 2017).

    Args:
        selection: which interactions an agent imitates.
        samples: interactions per row of data.
        truth_share: the share of interactions in which a decider learns the right decision in
            place of its own last answer; a number, or a schedule over iterations.

    Raises:
        ConfigError: if a value is out of range.
    """

    def __init__(
        self,
        selection: Selection = RewardThreshold(),
        samples: int = 1,
        truth_share: float | Schedule = 0.0,
    ) -> None:
        require_at_least(1, samples=samples)
        self.selection = selection
        self.samples = samples
        self.truth_share = schedule_of(truth_share, "truth_share", 0, 1)

    def training_set(
        self,
        trees: Sequence[Sequence[Interaction]],
        agents: Sequence[str],
        iteration: int,
        seed: int,
    ) -> Demonstrations:
        interactions = [leaf for tree in trees for leaf in tree]
        deciders = interactions[0].conversation.protocol.deciders if interactions else ()
        examples: list[Example] = []
        for agent in agents:
            rng = random.Random(seed_of(f"{seed}/{agent}".encode()))
            own = interactions
            if agent in deciders:
                share = self.truth_share.at(iteration)
                drawn = [rng.random() < share for _ in interactions]
                pairs = list(zip(interactions, drawn, strict=True))
                own = [interaction for interaction, told in pairs if not told]
                for interaction, told in pairs:
                    examples += true_decision(interaction, agent) if told else ()
            rewards = [interaction.conversation.rewards[agent] for interaction in own]
            for place in self.selection.choose(rewards, rng):
                examples += turns_of(own[place], agent)
        return Demonstrations(examples)


def turns_of(interaction: Interaction, agent: str) -> Iterator[Example]:
    """Yield what an agent answered, turn by turn, without answers that could not be read."""
    for turn in interaction.conversation.turns:
        could_be_read = turn.said or turn.decision in (REJECT, ACCEPT)
        if turn.agent == agent and could_be_read:
            yield Example(turn.messages, turn.answer)


def true_decision(interaction: Interaction, agent: str) -> Iterator[Example]:
    """Yield the last turn of a decider, with the right decision."""
    conversation = interaction.conversation
    turns = [turn for turn in conversation.turns if turn.agent == agent]
    for turn in turns[-1:]:
        answer = conversation.scenario.deciding(turn.answer, conversation.label)
        yield Example(turn.messages, answer)
