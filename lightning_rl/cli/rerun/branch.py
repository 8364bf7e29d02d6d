"""Forks a recorded rollout at a call: what if the model had answered differently there?"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rl.agents.branching import forked
from lightning_rl.agents.rows import captured
from lightning_rl.cli.rerun.rebuild import Remade, remade_for_one
from lightning_rl.cli.rerun.rollouts import data_with_engine, pushed_engine
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout


@dataclass(frozen=True)
class BranchRerun:
    """A recorded rollout, and branches that continue differently from one of its calls.

    ``call`` counts from 0; the ``branches`` were generated with the weights of ``version``.
    """

    recorded: Rollout
    call: int
    branches: list[Rollout]
    version: int
    kept: KeptWeights
    weights_differ: bool
    decode: Callable[[list[int]], Any]

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        exact = ", NOT as recorded: checksums differ" if self.weights_differ else ""
        return [
            f"rollout {self.recorded.id} forked before call {self.call + 1} of "
            f"{len(self.recorded.model_calls())}",
            f"weights of version {self.version}: {self.kept.lead_to(self.version)}{exact}",
            f"recorded: {self._went_on(self.recorded)}",
            *(
                f"branch {number}: {self._went_on(branch)}"
                for number, branch in enumerate(self.branches, 1)
            ),
            *self._compared(),
        ]

    def _went_on(self, rollout: Rollout) -> str:
        """Describe the answer at the fork, and how the rollout ended."""
        calls = rollout.model_calls()
        if rollout.error is not None or len(calls) <= self.call:
            return f"{rollout.status.value}, {rollout.error or 'without an answer'}"
        answer = self.decode(captured(rollout, calls[self.call]).completion.token_ids)
        more = len(calls) - self.call - 1
        reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
        return f"{answer!r}, {more} more call{'s' * (more != 1)}, {reward}"

    def _compared(self) -> list[str]:
        rewards = [branch.reward for branch in self.branches if branch.reward is not None]
        if not rewards or self.recorded.reward is None:
            return []
        mean = fmean(rewards)
        return [
            f"mean reward of {len(rewards)} branches {mean:g}; the recorded answer's reward "
            f"{self.recorded.reward:g} differs from it by {self.recorded.reward - mean:+g}"
        ]


def branch_rollout(
    run: RecordedRun, rollout_id: str, call: int, count: int, out: Path | None = None
) -> BranchRerun | None:
    """Fork a rollout before one of its calls, continue it ``count`` times, and grade the branches.

    Up to the fork nothing is generated: the recorded tokens are kept, whichever versions wrote
    them.

    Args:
        run: the recorded run.
        rollout_id: the id of the recorded rollout.
        call: the index of the call, from 0.
        count: the number of branches.
        out: a rollout file to which the branches are added.

    Returns:
        The branches; None on a rank that only helps to train.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if there is no such rollout, or the run kept too little.
        EpisodeError: if the rollout has no such call.
        EngineError: if the engine fails.
        RewardError: if too large a share could not be graded.
    """
    recorded = run.rollout(rollout_id)
    branches = [forked(recorded, call, number) for number in range(count)]
    versions = captured(recorded, recorded.model_calls()[call]).completion.versions
    if recorded.demonstration or not versions or versions[0] < 0:
        raise DataError(f"rollout {rollout_id!r} has no answer of an engine there to rerun")
    with remade_for_one(run, versions[0]) as made:
        if made is None:
            return None
        _go_on(made, branches)
        differ = made.diverged_at(run.log.outcomes()) is not None
        decode = made.module.tokenizer.decode
    if out is not None:
        file = open_rollouts(out)
        file.append(branches, versions[0])
        file.close()
    return BranchRerun(recorded, call, branches, versions[0], made.kept, differ, decode)


def _go_on(made: Remade, branches: list[Rollout]) -> None:
    """Let the run's agent and engine complete the branches, and its rewards grade them."""
    data = data_with_engine(made)
    task = data.task_of(branches[0].prompt)
    tokenizer = data.load_tokenizer(made.module)
    task.agent.configure(tokenizer)
    sampling = task.sampling.of(branches[0].sampling)
    pipeline = RolloutPipeline(data.engine, task.agent, task.rewards, tokenizer)
    try:
        with pushed_engine(made, data):
            pipeline.complete([branches], sampling)
    finally:
        task.agent.close()
        task.rewards.close()
