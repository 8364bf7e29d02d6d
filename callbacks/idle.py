"""Finds iterations in which nothing was learned, and why."""

import math
from collections.abc import Mapping, Sequence

from tensordict import TensorDict

from lightning_rl.callbacks.samples import Stateful
from lightning_rl.collect.tasks import Task
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.skipped import has_zero_advantage
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Rollout, RolloutStatus
from lightning_rl.run.processes.dist import all_sum


class Idle(Stateful):
    """Counts iterations in a row without learning, and what they had in common.

    Nothing is learned if no policy had a gradient, a learning rate or, where the loss rewards
    advantages alone, an advantage: a KL penalty or entropy bonus still moves such a policy, but
    nothing that was rewarded.
    """

    state_names = ("in_a_row", "total", "iteration", "reason")

    def __init__(self) -> None:
        self.in_a_row = self.total = self.iteration = 0
        self.reason = ""
        """Why nothing was learned in the last such iteration."""
        self._rewards = ""
        self._without: set[str] = set()
        self._asked: set[str] = set()

    def look_at_rollouts(self, rollouts: Sequence[Rollout], tasks: Sequence[Task]) -> None:
        """Note what an iteration's rewards have in common."""
        bounds = {task.name: task.success_reward for task in tasks}
        self._rewards = _sameness(rollouts, bounds)

    def look_at_batch(self, module: PolicyModule, batch: TensorDict) -> None:
        """Note whether a policy's batch has an advantage, on all ranks; all of them call it."""
        self._asked.add(module.name)
        teaches = (~has_zero_advantage(batch)).sum()
        if module.objective.loss.zero_at_zero_advantage and not all_sum(teaches):
            self._without.add(module.name)

    def end_iteration(self, module: RecordingModule, row: Mapping[str, float]) -> None:
        """Count an iteration by its row of metrics; further rows of it do not count."""
        if module.iteration <= self.iteration:
            return
        self.iteration = module.iteration
        reason = self._reason(module, row)
        self._without, self._asked = set(), set()
        self.in_a_row = 0 if reason is None else self.in_a_row + 1
        if reason is not None:
            self.total, self.reason = self.total + 1, reason

    def _reason(self, module: RecordingModule, row: Mapping[str, float]) -> str | None:
        """Return why nothing was learned; None if something was, or it is not known."""
        norms = [row[name] for name in module.names_of("policy/grad_norm") if name in row]
        rates = [row[name] for name in module.names_of("policy/lr") if name in row]
        if not norms:
            return "the update was skipped" if self._asked else None
        if self._asked and self._asked == self._without:
            return self._rewards or "no rollout has an advantage"
        if not any(norms):
            truncated = row.get("rollout/truncated_share") == 1
            reason = "all rollouts reached max_tokens, and mask_truncated leaves those out"
            return (
                reason
                if truncated and isinstance(module, PolicyModule) and module.update.mask_truncated
                else (self._rewards or "the gradient is zero")
            )
        if rates and not any(rates):
            return "the learning rate is 0"
        steps = [row[n] for n in module.names_of("policy/nonfinite_skipped") if row.get(n)]
        return "a gradient was not finite" if steps and not any(map(math.isfinite, norms)) else None


def _sameness(rollouts: Sequence[Rollout], bounds: Mapping[str, float]) -> str:
    """Say what rewards have in common so that none is better than another; empty: nothing."""
    own = [rollout for rollout in rollouts if rollout.trained]
    graded = [rollout for rollout in own if rollout.reward is not None]
    if not graded:
        return "no rollout could be graded" if own else ""
    skipped = all(rollout.status is RolloutStatus.SKIPPED for rollout in graded)
    rejected = "; filters rejected every group" if skipped else ""
    values = {rollout.reward for rollout in graded if rollout.reward is not None}
    if len(values) == 1:
        [value] = values
        right = [value >= bounds.get(rollout.prompt.set, 1.0) for rollout in graded]
        kind = "all right" if all(right) else "all equal" if any(right) else "all wrong"
        return f"every reward is {value:g} ({kind}){rejected}"
    groups: dict[str, set[float | None]] = {}
    for rollout in graded:
        groups.setdefault(rollout.group_id, set()).add(rollout.reward)
    if all(len(group) == 1 for group in groups.values()):
        return f"within every group all rewards are equal{rejected}"
    return ""
