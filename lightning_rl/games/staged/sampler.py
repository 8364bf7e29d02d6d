"""Sampler: plays interactions with the agents' models, and stores each as soon as it is over."""

import asyncio
import shutil
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_rl.config.schema import one_line
from lightning_rl.data.rollouts.files import Recorded, open_rollouts
from lightning_rl.engines.sampling import request_seed, seed_of
from lightning_rl.errors import DataError
from lightning_rl.games.protocols.agent import result, transcript
from lightning_rl.games.protocols.base import Protocol
from lightning_rl.games.protocols.conversation import Conversation
from lightning_rl.games.protocols.scenario import Scenario
from lightning_rl.games.staged.chat import ChatAnswer, ChatModel
from lightning_rl.games.staged.interaction import Interaction
from lightning_rl.games.staged.units import Unit
from lightning_rl.rollout import Message, Prompt, Rollout, RolloutStatus, own

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree that was sampled for a unit: its leaves, in the order of their paths."""

    unit: Unit
    leaves: list[Interaction]

    def rollouts(self, iteration: int) -> list[Rollout]:
        """Return a rollout for each leaf; ``extra`` holds all that is needed to rebuild it."""
        unit = self.unit
        return [
            _as_rollout(leaf, unit, f"{iteration}/{unit.draw}", unit.sample + number)
            for number, leaf in enumerate(self.leaves)
        ]


class InteractionSampler:
    """Samples trees of interactions concurrently.

    They are stored in a rollout file, from which they can be read back.

    Args:
        protocol: who speaks when.
        scenario: what the agents are told.
        chats: by agent, the model that answers.
        max_concurrency: the most trees, and the most questions, at the same time.
        seed: determines all random choices.
    """

    def __init__(
        self,
        protocol: Protocol,
        scenario: Scenario,
        chats: Mapping[str, ChatModel],
        max_concurrency: int,
        seed: int,
    ) -> None:
        self.protocol = protocol
        self.scenario = scenario
        self.chats = chats
        self.max_concurrency = max_concurrency
        self.seed = seed

    def held(self, path: Path, iteration: int) -> dict[str, Tree]:
        """Return the trees of an iteration that a rollout file holds, by their units' names."""
        file = open_rollouts(path)
        file.recover()  # what a kill cut off is sampled again
        file.close()
        trees: dict[str, Tree] = {}
        for recorded in file.read() if path.exists() else ():
            if recorded.iteration == iteration:
                unit, leaf = self._replayed(recorded, iteration)
                trees.setdefault(unit.name, Tree(unit, [])).leaves.append(leaf)
        file.close()
        return trees

    async def sample(
        self, path: Path, units: Sequence[Unit], width: int, iteration: int
    ) -> dict[str, Tree]:
        """Sample the trees of these units, by name; each is written as soon as it is complete.

        Args:
            path: a rollout file.
            units: what to sample.
            width: answers in each place.
            iteration: recorded with each rollout, and part of its seed.
        """
        file = open_rollouts(path)
        file.recover()
        trees: dict[str, Tree] = {}
        gate = asyncio.Semaphore(self.max_concurrency)
        questions = asyncio.Semaphore(self.max_concurrency)

        async def play(unit: Unit) -> None:
            async with gate:
                start = self._start(unit, iteration)
                tree = Tree(unit, await self._grow(start, width, questions))
                file.append(tree.rollouts(iteration), iteration, {})
                trees[unit.name] = tree

        try:
            await _together([play(unit) for unit in units])
        finally:
            file.close()
        return trees

    # ---------------------------------------------------------------- inside

    def _start(self, unit: Unit, iteration: int) -> Interaction:
        # What chance decides is the same for all of a draw, so that they can be compared.
        chance = seed_of(f"{self.seed}/{iteration}/{unit.draw}".encode())
        begun = Conversation.begin(self.protocol, self.scenario, own(unit.columns), chance)
        return Interaction(begun, request_seed(self.seed, str(unit.draw), unit.sample, iteration))

    async def _grow(
        self, node: Interaction, width: int, questions: asyncio.Semaphore
    ) -> list[Interaction]:
        """Return all leaves below a node."""
        if node.conversation.done:
            return [node]
        # Whose answer could not be read is asked again, in the same place.
        width_here = 1 if node.conversation.unread else width
        branches = [self._branch(node, number, width, questions) for number in range(width_here)]
        return [leaf for leaves in await _together(branches) for leaf in leaves]

    async def _branch(
        self, node: Interaction, number: int, width: int, questions: asyncio.Semaphore
    ) -> list[Interaction]:
        place = ".".join(map(str, (*node.path, number)))

        async def ask(agent: str, messages: list[Message]) -> ChatAnswer:
            seed = seed_of(f"{node.seed}/{place}/{agent}".encode())
            async with questions:
                return await self.chats[agent].ask(messages, seed)

        asked = node.conversation.asks()
        answers = await _together([ask(*question) for question in asked.items()])
        told = dict(zip(asked, answers, strict=True))
        return await self._grow(node.after(told, number), width, questions)

    def _replayed(self, recorded: Recorded, iteration: int) -> tuple[Unit, Interaction]:
        """Return the unit of a recorded leaf, and the leaf."""
        told, prompt = recorded.rollout.extra, recorded.rollout.prompt
        try:
            place = (int(told["draw"]), int(told["sample"]), int(prompt.id))
            unit = Unit(*place, prompt.columns)
            steps = [
                {agent: ChatAnswer(*answer) for agent, answer in step.items()}
                for step in told["answers"]
            ]
            return unit, self._start(unit, iteration).replayed(told["path"], steps)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{recorded.where} holds no interaction of this protocol and scenario "
                f"({type(error).__name__}: {one_line(error)}); restore the file, or use another "
                "run_dir"
            ) from error


def cut_answers(rollout: Rollout) -> list[bool]:
    """Return for each answer that led to a leaf whether its limit of tokens cut it off."""
    return [cut for step in rollout.extra["answers"] for _, cut in step.values()]


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return their results; if one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


def remove_rollouts(path: Path) -> None:
    """Remove a rollout file, which may be a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _as_rollout(leaf: Interaction, unit: Unit, group: str, number: int) -> Rollout:
    told = dict(result(leaf.conversation))
    *_, last = (answer for step in leaf.answers for answer in step.values())
    return Rollout(
        prompt=Prompt(str(unit.row), str(unit.columns.get("prompt", "")), [], dict(unit.columns)),
        group_id=group,
        sample_index=number,
        seed=leaf.seed,
        completion=transcript(leaf.conversation),
        status=RolloutStatus.COMPLETED,
        finish_reason="length" if last.cut else "stop",
        reward=told.pop("reward"),
        role_rewards=told.pop("role_rewards"),
        logged=told.pop("metrics"),
        extra=told
        | {
            "draw": unit.draw,
            "sample": unit.sample,
            "path": list(leaf.path),
            "answers": [{a: list(said) for a, said in step.items()} for step in leaf.answers],
        },
    )
