"""Interaction: a conversation with the answers that led to it; and trees of interactions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_rl.games.protocols.conversation import Conversation, Turn
from lightning_rl.games.staged.chat import ChatAnswer

Answers = Mapping[str, ChatAnswer]
"""Answers by agent, of those that were asked at the same time."""


@dataclass(frozen=True)
class Interaction:
    """The state of a conversation, and how it was reached; a step is one or more answers at once.

    ``path[i]`` numbers step i among those sampled in its place, and ``answers[i]`` are its answers.
    ``taken[i]`` are the resulting turns: none for an answer that could not be read, whose agent is
    asked again. ``paid[i]`` is what agents had been paid before the step. The seeds of its
    questions are derived from ``seed``.
    """

    conversation: Conversation
    seed: int
    path: tuple[int, ...] = ()
    answers: tuple[Answers, ...] = ()
    taken: tuple[Mapping[str, Turn], ...] = ()
    paid: tuple[Mapping[str, float], ...] = ()

    def after(self, answers: Answers, number: int) -> "Interaction":
        """Return the interaction one step on, the ``number``-th of those sampled here."""
        before = self.conversation
        now = before.after({agent: answer.text for agent, answer in answers.items()})
        new = {turn.agent: turn for turn in now.turns if turn not in before.turns}
        path, told = (*self.path, number), (*self.answers, answers)
        taken, paid = (*self.taken, new), (*self.paid, before.rewards)
        return Interaction(now, self.seed, path, told, taken, paid)

    def replayed(self, path: Sequence[int], answers: Sequence[Answers]) -> "Interaction":
        """Return the interaction that these answers lead to."""
        now = self
        for number, step in zip(path, answers, strict=True):
            now = now.after(step, number)
        return now


def subtrees(leaves: Sequence[Interaction], depth: int) -> list[list[Interaction]]:
    """Return the leaves below a node, grouped by the node's child; [] if the node is a leaf.

    Args:
        leaves: leaves whose paths begin alike.
        depth: steps from the root to the node.
    """
    children: dict[int, list[Interaction]] = {}
    for leaf in leaves:
        if len(leaf.path) > depth:
            children.setdefault(leaf.path[depth], []).append(leaf)
    return [children[number] for number in sorted(children)]


def expected_reward(leaves: Sequence[Interaction], agent: str, depth: int) -> float:
    """Return an agent's expected reward below a node; answers in one place are equally likely."""
    children = subtrees(leaves, depth)
    if not children:
        return leaves[0].conversation.rewards[agent]
    return sum(expected_reward(child, agent, depth + 1) for child in children) / len(children)


def value_from(leaves: Sequence[Interaction], agent: str, depth: int) -> float:
    """Return an agent's expected reward after an answer, without what was paid before it.

    Args:
        leaves: the leaves that descend from the answer.
        agent: the agent that is paid.
        depth: steps from the root to the answer; 0 for the first.
    """
    return expected_reward(leaves, agent, depth + 1) - leaves[0].paid[depth][agent]
