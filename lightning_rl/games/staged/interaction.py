"""Interaction: a conversation with the answers that led to it; and trees of such."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_rl.games.protocols.conversation import Conversation, Turn
from lightning_rl.games.staged.chat import ChatAnswer

Answers = Mapping[str, ChatAnswer]
"""By agent, of those that were asked at the same time."""


@dataclass(frozen=True)
class Interaction:
    """Where a conversation stands, step by step; a step is one or more answers at once.

    ``path[i]`` numbers step i among those that were sampled in its place, ``answers[i]`` is what
    was answered, and ``taken[i]`` are the turns that came of it: none of an answer that could not
    be read, and whose agent is asked again. ``paid[i]`` is what agents had been paid before it.
    From ``seed`` those of its questions are derived.
    """

    conversation: Conversation
    seed: int
    path: tuple[int, ...] = ()
    answers: tuple[Answers, ...] = ()
    taken: tuple[Mapping[str, Turn], ...] = ()
    paid: tuple[Mapping[str, float], ...] = ()

    def after(self, answers: Answers, number: int) -> "Interaction":
        """The interaction one step on, the ``number``-th of those sampled here."""
        before = self.conversation
        now = before.after({agent: answer.text for agent, answer in answers.items()})
        new = {turn.agent: turn for turn in now.turns if turn not in before.turns}
        path, told = (*self.path, number), (*self.answers, answers)
        taken, paid = (*self.taken, new), (*self.paid, before.rewards)
        return Interaction(now, self.seed, path, told, taken, paid)

    def replayed(self, path: Sequence[int], answers: Sequence[Answers]) -> "Interaction":
        """The interaction that such answers lead to."""
        now = self
        for number, step in zip(path, answers, strict=True):
            now = now.after(step, number)
        return now


def subtrees(leaves: Sequence[Interaction], depth: int) -> list[list[Interaction]]:
    """Leaves of one node, by the child of it that they descend from; [] if it is a leaf itself.

    Args:
        leaves: with equal beginnings of their paths.
        depth: steps to the node.
    """
    children: dict[int, list[Interaction]] = {}
    for leaf in leaves:
        if len(leaf.path) > depth:
            children.setdefault(leaf.path[depth], []).append(leaf)
    return [children[number] for number in sorted(children)]


def expected_reward(leaves: Sequence[Interaction], agent: str, depth: int) -> float:
    """What a node pays an agent on average, if each answer is as likely as those beside it."""
    children = subtrees(leaves, depth)
    if not children:
        return leaves[0].conversation.rewards[agent]
    return sum(expected_reward(child, agent, depth + 1) for child in children) / len(children)


def value_from(leaves: Sequence[Interaction], agent: str, depth: int) -> float:
    """What an answer leads to for an agent on average, without what was paid before it was given.

    Args:
        leaves: that descend from the answer.
        agent: who is paid.
        depth: of the answer, in steps from the root; that of the first is 0.
    """
    return expected_reward(leaves, agent, depth + 1) - leaves[0].paid[depth][agent]
