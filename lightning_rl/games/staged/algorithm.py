"""StagedAlgorithm: what is sampled in an iteration, and what a job learns from it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lightning_rl.games.staged.interaction import Interaction
from lightning_rl.games.staged.training_sets import TrainingSet


class StagedAlgorithm(ABC):
    """Turns interactions into training sets for fine-tuning jobs.

    For each row of data ``samples`` trees of interactions are sampled, in which each step is
    answered ``width`` times; with a width of 1 a tree is a single interaction.
    """

    samples: int = 1
    width: int = 1

    @abstractmethod
    def training_set(
        self,
        trees: Sequence[Sequence[Interaction]],
        agents: Sequence[str],
        iteration: int,
        seed: int,
    ) -> TrainingSet:
        """Return the training set of the model that some agents share.

        Args:
            trees: the leaves of each tree, in the order of their paths.
            agents: the agents that share the model.
            iteration: counted from 0.
            seed: determines all random choices.
        """
