"""StagedAlgorithm: what is sampled in an iteration, and what a job learns from it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lightning_rl.games.staged.interaction import Interaction
from lightning_rl.games.staged.training_sets import TrainingSet


class StagedAlgorithm(ABC):
    """Turns interactions into what fine-tune jobs learn from.

    Of each row of data ``samples`` trees of interactions are sampled, in which each step is
    answered ``width`` times; with 1 a tree is a single interaction.
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
        """What the model that some agents share is to learn.

        Args:
            trees: the leaves of each tree, in the order of their paths.
            agents: that share the model.
            iteration: counted from 0.
            seed: of what chance decides.
        """
