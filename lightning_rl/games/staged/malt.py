"""MALT: preference pairs of an answer that led to high rewards and one that did not."""

import random
from collections.abc import Iterator, Sequence

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.sampling import seed_of
from lightning_rl.errors import require_at_least, require_finite
from lightning_rl.games.protocols.conversation import Turn
from lightning_rl.games.staged.algorithm import StagedAlgorithm
from lightning_rl.games.staged.interaction import Interaction, subtrees, value_from
from lightning_rl.games.staged.training_sets import Pair, Preferences


@configurable
class MALT(StagedAlgorithm):
    """Samples trees of answers, and pairs siblings in them for DPO (Motwani et al. 2024, MALT).

    Each step of an interaction is answered ``width`` times, and each answer is continued. An
    answer's value is its agent's mean reward from there on, E[r] over its descendants: it is good
    if it reaches a threshold, else bad. Of the answers in one place, a good and a bad one make a
    pair; if there are several of each, one is drawn at random.

    Args:
        width: answers in each place; an interaction of n steps costs width + ... + width^n.
        thresholds: by agent; the default is 0 for deciders and 0.5 for provers, the middle of what
            a protocol can pay them. With ``shared_reward``, set provers to 0.

    Raises:
        ConfigError: if a value is out of range.
    """

    def __init__(self, width: int = 2, thresholds: dict[str, float] | None = None) -> None:
        require_at_least(2, width=width)
        require_finite(**(thresholds or {}))
        self.width = width
        self.thresholds = dict(thresholds or {})

    def training_set(
        self,
        trees: Sequence[Sequence[Interaction]],
        agents: Sequence[str],
        iteration: int,
        seed: int,
    ) -> Preferences:
        pairs: list[Pair] = []
        for agent in agents:
            rng = random.Random(seed_of(f"{seed}/{agent}".encode()))
            for tree in trees:
                decides = agent in tree[0].conversation.protocol.deciders
                threshold = self.thresholds.get(agent, 0.0 if decides else 0.5)
                pairs += sibling_pairs(tree, agent, threshold, rng)
        return Preferences(pairs)


def sibling_pairs(
    leaves: Sequence[Interaction],
    agent: str,
    threshold: float,
    rng: random.Random,
    depth: int = 0,
) -> Iterator[Pair]:
    """Yield a pair of an agent's answers for each node with a good and a bad one, from the root
    down.

    Args:
        leaves: all leaves that descend from a node.
        agent: the agent whose answers are paired.
        threshold: an answer is good if its E[r] is at least this, else bad.
        rng: draws one of several.
        depth: steps from the root to the node.
    """
    children = subtrees(leaves, depth)
    good: list[Turn] = []
    bad: list[Turn] = []
    for child in children:
        turn = child[0].taken[depth].get(agent)
        if turn is not None:
            worth = value_from(child, agent, depth)
            (good if worth >= threshold else bad).append(turn)
    couples = [(g, b) for g in good for b in bad if g.answer != b.answer]
    if couples:
        chosen, rejected = rng.choice(couples)
        yield Pair(chosen.messages, chosen.answer, rejected.answer)
    for child in children:
        yield from sibling_pairs(child, agent, threshold, rng, depth + 1)
