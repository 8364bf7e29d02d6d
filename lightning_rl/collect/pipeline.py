"""RolloutPipeline: from prompts to graded rollouts (issue, generate, decode, grade)."""

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby, islice
from traceback import walk_tb
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent, new_rollout, new_rollouts
from lightning_rl.agents.branching import repeats_shared_calls
from lightning_rl.agents.rows import drop_unasked
from lightning_rl.collect.tasks import Task
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.plans import GroupPlan
from lightning_rl.data.prompts import Prompts
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import (
    ConfigError,
    EngineError,
    LightningRLError,
    PictureError,
    RunInterrupted,
)
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.by_set import RewardsBySet
from lightning_rl.rollout import Group, Prompt, Rollout, RolloutStatus, primitives
from lightning_rl.run.clock import StageClock
from lightning_rl.run.loop.background import note_progress, require_awaited, run_async
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.exits import RAISED_BY_FUNCTIONS, UsesSignals, function_called_here


class GroupSource:
    """Draws prompts and turns each into a group, at a fixed number of groups per batch.

    On several ranks each rank has its own source. All draw the same prompts, and each keeps every
    n-th one, with the place and the seeds that it would have on one process.

    Args:
        prompts: the prompts to draw from; already loaded.
        num_groups: groups per iteration (B) on this rank.
        group_size: rollouts per group (G).
        sampling: sampling settings of all rollouts.
        seed: the seed from which the seed of every rollout is derived.
        iterations: returns the number of iterations of the run, beyond which no collector works
            ahead; None: no limit.
        rank: index of this rank among ``ranks``.
        ranks: number of ranks that share the prompts.
        tasks: what the prompts of their sets get instead of these settings.
        plan: plans the groups of prompts that belong to no task.
    """

    def __init__(
        self,
        prompts: Prompts,
        num_groups: int,
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        iterations: Callable[[], int | None] = lambda: None,
        rank: int = 0,
        ranks: int = 1,
        tasks: Sequence[Task] = (),
        plan: GroupPlan | None = None,
    ) -> None:
        self.prompts = prompts
        self.num_groups = num_groups
        self.group_size = group_size
        self.sampling = sampling
        self.seed = seed
        self.iterations = iterations
        self.rank = rank
        self.ranks = ranks
        self._by_set = {task.name: task for task in tasks}
        self.plan = plan or GroupPlan()
        self.iteration = 0
        self.drawn = 0
        """Number of this rank's prompts drawn over the whole run."""
        self._place = 0
        self._again: deque[Prompt] = deque()

    def begin(self, iteration: int) -> None:
        """Issue groups for this iteration from now on, or ahead for later ones."""
        if iteration != self.iteration:
            self.iteration, self._place = iteration, 0

    def next(self) -> Group:
        """Return the group of the next prompt; prompts that were given back come first."""
        return self.issue(self._again.popleft() if self._again else self._draw())

    def _draw(self) -> Prompt:
        self.drawn += 1
        return self.prompts.draw(self.ranks)[self.rank]

    def catch_up(self, drawn: int) -> None:
        """Draw as many prompts as another rank has, so that all continue from the same place."""
        while self.drawn < drawn:
            self.give_back(self._draw())

    def issue(self, prompt: Prompt) -> Group:
        """Return a new group of this prompt."""
        position = self._place * self.ranks + self.rank
        prompt_sampling = self.by_prompt(prompt)

        def new(index: int) -> Rollout:
            return new_rollout(
                prompt, index, prompt_sampling.sampling, self.seed, self.iteration, position
            )

        another = map(new, count()).__next__
        self._place += 1
        return prompt_sampling.plan.begin(
            [another() for _ in range(prompt_sampling.group_size)], another
        )

    def by_prompt(self, prompt: Prompt) -> "GroupSource | Task":
        """Return what a prompt's group size, sampling and plan are set in."""
        return self._by_set.get(prompt.set, self)

    def give_back(self, prompt: Prompt) -> None:
        """Issue a prompt again later, because its group was given up."""
        self._again.append(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return {
            "prompts": self.prompts.state_dict(),
            "ranks": self.ranks,
            "drawn": self.drawn,
            "iteration": self.iteration,
            "place": self._place,
            "again": [primitives(prompt) for prompt in self._again],
        }

    def load_shares(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume where the sources of all ranks stood, whose number may have changed since.

        Prompts that only some ranks had drawn, and those to be issued again, are redistributed.
        """
        if len(states) == self.ranks:
            self.load_state_dict(states[self.rank])
            return
        furthest = max(state["drawn"] for state in states)
        again = []
        for rank, state in enumerate(states):
            one = GroupSource(self.prompts, 1, 1, self.sampling, rank=rank, ranks=len(states))
            one.load_state_dict(state)
            one.catch_up(furthest)  # afterwards the prompts stand where all of them do
            again.append(one._again)
        self._again = deque(dist.reshard(list(map(list, again)), self.rank, self.ranks))
        self.drawn = furthest
        # Places that no rank has used: those of an iteration tell its groups apart.
        used = max(state["place"] for state in states) * len(states)
        self.iteration, self._place = states[0]["iteration"], math.ceil(used / self.ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken, with the same number of ranks."""
        self.prompts.load_state_dict(state["prompts"])
        self.drawn = state["drawn"]
        self.iteration, self._place = state["iteration"], state["place"]
        self._again = deque(Prompt(**record) for record in state["again"])


@dataclass
class RolloutPipeline:
    """Generates and grades rollouts. It needs no Trainer, so your own scripts can use it.

    ``clock`` times the stages. ``tasks`` tells the agent, sampling and plan of the prompts of their
    sets; ``plan`` adds rollouts to the groups of all other prompts.
    """

    engine: Engine
    agent: Agent
    rewards: Rewards | RewardsBySet
    tokenizer: PreTrainedTokenizerBase
    clock: StageClock = field(default_factory=StageClock)
    tasks: Sequence[Task] = ()
    plan: GroupPlan = field(default_factory=GroupPlan)

    def __post_init__(self) -> None:
        self._by_set = {task.name: task for task in self.tasks}
        self.rewards.configure(self.tokenizer)

    def run(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int = 0,
        iteration: int = 0,
    ) -> list[Rollout]:
        """Generate and grade ``group_size`` rollouts of every prompt, all concurrently.

        Returns:
            The rollouts, group by group.

        Raises:
            EngineError: if the engine is not ready, or fails.
            RewardError: if too large a share of the rollouts could not be graded.
        """
        groups = [
            new_rollouts([p], group_size, self._by(p, sampling)[1], seed, iteration, index)
            for index, p in enumerate(prompts)
        ]
        self.complete(groups, sampling)
        return [rollout for group in groups for rollout in group]

    def complete(self, groups: Sequence[Group], sampling: Sampling) -> None:
        """Generate and grade empty groups in place; raises the same errors as :meth:`run`."""
        self.engine.require_ready()
        rollouts = [rollout for group in groups for rollout in group]
        with self.clock("generate"):
            run_async(self.generate(groups, sampling, growing=False))
        self.grade(groups)
        self.rewards.require_graded(rollouts)

    def complete_together(self, groups: Sequence[Group], sampling: Sampling) -> list[Rollout]:
        """Complete groups as :meth:`complete` does, sharing the work among all ranks.

        All ranks must pass the same groups, and all get all rollouts back.
        """
        share = groups if self.engine.serves_all_ranks else dist.shard(groups)
        with dist.every_rank():
            if drives_engine(self.engine):
                self.complete(share, sampling)
            else:
                share = []
        together = dist.interleaved(dist.gather(share))
        return [rollout for group in together for rollout in group]

    async def generate(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        max_concurrency: int | asyncio.Semaphore | None = None,
        growing: bool = True,
    ) -> None:
        """Let the agent generate all unfinished rollouts, at most ``max_concurrency`` at a time.

        Calls that are given the same semaphore share its places.

        A rollout whose agent raises becomes FAILED with that reason; the others continue. If plans
        let groups grow and ``growing`` is True, each branch is added to its group behind the
        rollout it branched off from.

        Raises:
            EngineError: if the engine fails.
            ConfigError: if an agent rejects its configuration, or if ``groups`` is a list of
                rollouts.
        """
        if any(isinstance(group, Rollout) for group in groups):
            raise ConfigError(
                "pipeline.generate(rollouts, ...) got a list of rollouts; it takes a list of "
                "groups, to which branches may be added: pass [group]"
            )
        gate = max_concurrency
        if not isinstance(gate, asyncio.Semaphore):
            gate = asyncio.Semaphore(gate or sys.maxsize)

        async def fill(group: Group, rollout: Rollout) -> None:
            agent, own, plan = self._by(rollout.prompt, sampling)
            if rollout.sampling != own.distribution:  # a plan's choice
                own = own.of(rollout.sampling)
            if rollout.status is RolloutStatus.INIT:
                require_awaited()  # of many, all begin before the loop can cancel one
                async with gate:
                    await run_agent(agent, rollout, self.engine, own)
                note_progress()
            if growing and rollout.completed and (branches := plan.grow(rollout)):
                known = {member.id for member in group}  # those of a checkpoint
                branches = [branch for branch in branches if branch.id not in known]
                group += branches
                for branch in branches:
                    tasks.create_task(fill(group, branch))

        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                require_awaited()
                for rollout in group:
                    tasks.create_task(fill(group, rollout))
        if any(r.status is RolloutStatus.INIT for group in groups for r in group):
            require_awaited()
        for group in groups:
            group.sort(key=_place)
        done = (r for group in groups for r in group if r.finish_reason is not None)
        self._decode(list(done))  # also of a checkpoint

    def _by(self, prompt: Prompt, sampling: Sampling) -> tuple[Agent, Sampling, GroupPlan]:
        """Return a prompt's agent, sampling settings (by default ``sampling``) and plan."""
        if (task := self._by_set.get(prompt.set)) is not None:
            return task.agent, task.sampling, task.plan
        return self.agent, sampling, self.plan

    def grade(self, groups: Sequence[Group]) -> None:
        """Grade all ungraded rollouts, and wait for the result."""
        ungraded = [group for group in groups if any(_is_ungraded(r) for r in group)]
        if ungraded:
            with self.clock("reward"):
                self.rewards.grade_here(ungraded)

    def _decode(self, rollouts: list[Rollout]) -> None:
        """Set ``completion`` unless the agent did, which knows which tokens belong to which
        message.
        """
        rollouts = [rollout for rollout in rollouts if not rollout.completion]
        if not rollouts:
            return
        ends = end_tokens_of(self.tokenizer)
        rows = [list(map(ends.cut, _completions(rollout))) for rollout in rollouts]
        flat = list(chain.from_iterable(rows))
        texts = iter(self.tokenizer.batch_decode(flat, skip_special_tokens=True))
        for rollout, own in zip(rollouts, rows, strict=True):
            parts = list(islice(texts, len(own)))
            if rollout.rows[0].prompt_ids == rollout.prompt.token_ids:  # it continues that turn
                parts[0] = rollout.prompt.begun + parts[0]
            # A chat prompt gets a chat completion, as in TRL.
            chat = not isinstance(rollout.prompt.prompt, str)
            messages = [{"role": "assistant", "content": text} for text in parts]
            rollout.completion = messages if chat else "\n\n".join(parts)


def _completions(rollout: Rollout) -> list[list[int]]:
    """Return the tokens after the prompt of each row that has any; [[]] if none has."""
    return [row.token_ids for row in rollout.rows if row.token_ids] or [[]]


def _place(rollout: Rollout) -> tuple[int, int, int]:
    """Return the sort key of a rollout within its group."""
    fork = rollout.fork
    return rollout.sample_index, *((0, 0) if fork is None else (fork.calls, fork.number))


def in_groups(rollouts: Sequence[Rollout]) -> list[Group]:
    """Split rollouts into groups; the rollouts of a group must be adjacent."""
    return [list(group) for _, group in groupby(rollouts, lambda rollout: rollout.group_id)]


def _is_ungraded(rollout: Rollout) -> bool:
    return rollout.completed and rollout.reward is None


_ENDS_THE_RUN = (EngineError, ConfigError, RunInterrupted)


async def run_agent(agent: Agent, rollout: Rollout, engine: Engine, sampling: Sampling) -> None:
    """Let the agent generate a rollout; if the agent raises, the rollout is FAILED with the reason.

    Raises:
        EngineError: if the engine fails, even if the agent then raises its own error because of it;
            any other error of the engine is raised as well.
        ConfigError: if the agent's configuration is invalid.
        RunInterrupted: if the agent raises KeyboardInterrupt.
    """
    try:
        with function_called_here(), repeats_shared_calls(rollout):
            await agent.run(rollout, engine, sampling)
        drop_unasked(rollout)
        _require_finite(rollout)
    except asyncio.CancelledError as error:
        if _is_cancelled_from_outside():
            raise
        _blame(agent, rollout, error)
    except KeyboardInterrupt as error:  # it would end the loop's thread, and hang who waits for it
        raise RunInterrupted(f"{type(agent).__name__} raised KeyboardInterrupt", 130) from error
    except (BaseExceptionGroup, *RAISED_BY_FUNCTIONS) as error:  # a user's code may raise anything
        for cause in _causes(error):
            if isinstance(cause, _ENDS_THE_RUN) or _comes_from(engine, cause):
                raise cause  # noqa: B904  what the agent made of it says less
        _blame(agent, rollout, error)


def _require_finite(rollout: Rollout) -> None:
    """Fail a rollout whose logprobs would make a loss NaN."""
    bad = next((i for i, one in enumerate(rollout.logprobs) if not math.isfinite(one)), None)
    if bad is not None:
        rollout.fail(
            f"the engine's logprob of token {bad} is {rollout.logprobs[bad]}, so its numbers "
            f"overflow or its weights are damaged; use another engine dtype "
            f"(prompt {rollout.prompt.id!r})"
        )


def _blame(agent: Agent, rollout: Rollout, error: BaseException) -> None:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    signals = next((cause for cause in _causes(error) if isinstance(cause, UsesSignals)), None)
    if signals is not None and not isinstance(error, LightningRLError):  # which tells whose it is
        what = (
            f"{signals}, but agents run in another thread; bound the awaited call by "
            "asyncio.timeout, or do the work in a process, by subprocess.run(..., timeout=...)"
        )
    rollout.fail(f"agent {type(agent).__name__}: {what} (prompt {rollout.prompt.id!r})")


def _is_cancelled_from_outside() -> bool:
    """Return True unless the agent itself cancelled the task that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _comes_from(engine: Engine, error: BaseException) -> bool:
    """Return True if the engine's ``generate`` or ``look`` raised the error, whatever its class."""
    # The first goes through it, from the agent's timeout; the second is of what the agent gave it.
    if isinstance(error, asyncio.CancelledError | PictureError):
        return False
    asked = (getattr(engine, name, None) for name in ("generate", "look"))
    codes = [getattr(ask, "__code__", None) for ask in asked]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the members of its group, and the causes of each."""
    seen, left = set[int](), [error]
    while left:
        error = left.pop(0)
        if id(error) in seen:  # one that was raised again may come from itself
            continue
        seen.add(id(error))
        yield error
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        left += [e for e in (*inner, error.__cause__, error.__context__) if e is not None]
