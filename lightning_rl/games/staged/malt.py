"""MALT: of answers given in one place, those that pay in the end over those that do not."""

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
    """Trees of answers, and pairs of siblings in them for DPO (Motwani et al. 2024, MALT).

    Each step of an interaction is answered ``width`` times, and each answer gone on with. An
    answer is worth what its agent is paid on average from there on, E[r] over its descendants: it
    is good from a threshold on, else bad. Of the answers in one place, a good and a bad one make a
    pair; with several of each, chance takes one.

    Args:
        width: answers in each place; an interaction of n steps costs width + ... + width^n.
        thresholds: by agent; those that are not named: who decides 0, provers 0.5, the middle of
            what a protocol can pay them. With ``shared_reward``, name provers with 0.

    Raises:
        ConfigError: for values out of range.
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
    """A pair of an agent's answers for each node that has a good and a bad one; from the root down.

    Args:
        leaves: all that descend from a node.
        agent: whose answers.
        threshold: an answer is good if its E[r] is at least that, else bad.
        rng: takes one of several.
        depth: steps to the node.
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
