"""GroupPlan: which rollouts a group has, how each is sampled, and which of them are trained on."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Group, Rollout


class GroupPlan:
    """Plans the rollouts of each training group; by default ``group_size`` equal samples.

    A subclass overrides what it plans differently. A group passes through three calls: ``begin``
    before anything is generated, ``grow`` for each rollout as soon as it is written, and ``finish``
    once the group is graded and part of a batch. Plans may not depend on anything but their
    arguments, so that a resumed or repeated run plans the same.
    """

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prepare for a run with this tokenizer; called before anything else."""

    def begin(self, group: Group, another: Callable[[], Rollout]) -> Group:
        """Return the rollouts that a new group begins with.

        Args:
            group: one empty rollout per sample, which may be changed: ``sampling`` is the
                distribution that its tokens are sampled from, and with ``trained=False`` it is
                generated and graded, but neither trained on nor counted in metrics.
            another: returns one more empty rollout of the group, with a seed of its own.
        """
        return group

    def grow(self, rollout: Rollout) -> list[Rollout]:
        """Return the rollouts to generate because this one is complete; asked again on a resume."""
        return []

    def finish(self, group: Group) -> Group:
        """Return the rollouts of a graded group as the batch has them, after filters kept it.

        Rollouts may be left out, added, or marked ``trained=False``. Return changed copies
        (``dataclasses.replace``) instead of changing a rollout, which a checkpoint may still hold.
        What trained rows are compared with goes into ``Row.compared_with``, whose numbers become
        columns of the batch.
        """
        return group


class InTurn(GroupPlan):
    """Applies several plans, each to the result of the one before.

    Args:
        plans: the plans, in order.
    """

    def __init__(self, plans: Sequence[GroupPlan]) -> None:
        self.plans = plans

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for plan in self.plans:
            plan.configure(tokenizer)

    def begin(self, group: Group, another: Callable[[], Rollout]) -> Group:
        for plan in self.plans:
            group = plan.begin(group, another)
        return group

    def grow(self, rollout: Rollout) -> list[Rollout]:
        return [branch for plan in self.plans for branch in plan.grow(rollout)]

    def finish(self, group: Group) -> Group:
        for plan in self.plans:
            group = plan.finish(group)
        return group
