"""Compute exactly how often the best possible prover passes off graphs that are not isomorphic.

The verifier asks for nodes at random and accepts if all answers fit: it is the Ehrenfeucht-Fraisse
game with a spoiler that sees nothing, played with the facts that :mod:`.views` shows.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from recipes.graph_isomorphism.data import twins

Claims = tuple[tuple[int, int], ...]
"""Nodes of the first and of the second graph that are said to correspond."""


def fooled(first: np.ndarray, second: np.ndarray, questions: int, repeats: bool = True) -> float:
    """Return the chance that a prover that plays best has a fitting answer to every question.

    Args:
        first: (n, n) bytes.
        second: the same of the other graph.
        questions: about nodes of either graph, drawn one after the other.
        repeats: a question may be about a node that a claim is made of already.
    """
    facts = [_facts(first), _facts(second)]
    count = len(first)

    def chance(claims: Claims, left: int) -> float:
        if not left:
            return 1.0
        won = [
            best(claims, left, side, node)
            for side in (0, 1)
            for node in range(count)
            if repeats or all(claim[side] != node for claim in claims)
        ]
        return sum(won) / len(won) if won else 1.0

    def best(claims: Claims, left: int, side: int, node: int) -> float:
        most = 0.0
        for answer in range(count):
            claim = (node, answer) if side == 0 else (answer, node)
            if _fits(facts, (*claims, claim)):
                most = max(most, chance((*claims, claim), left - 1))
            if most == 1:
                break
        return most

    return chance((), questions)


def _facts(graph: np.ndarray) -> np.ndarray:
    """Encode in one number whether two nodes are equal or neighbours, and what they share."""
    wide = graph.astype(np.int64)
    return (np.eye(len(wide), dtype=np.int64) * 2 + wide) * 100 + wide @ wide


def _fits(facts: Sequence[np.ndarray], claims: Claims) -> bool:
    u, v = claims[-1]
    return all(facts[0][u, x] == facts[1][v, y] for x, y in claims)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a verifier can attain at best.")
    parser.add_argument("--twins", type=int, default=50)
    parser.add_argument("--nodes", type=int, nargs=2, default=(8, 12))
    parser.add_argument("--kind", choices=("random", "regular"), default="random")
    options = parser.parse_args()
    found = twins("test", options.twins, tuple(options.nodes), options.kind)
    pairs = [found.graphs[i, :, :n, :n] for i, n in enumerate(found.sizes)]
    for questions in (1, 2, 3):
        for repeats in (True, False):
            rates = [fooled(one, other, questions, repeats) for one, other in pairs]
            rate = float(np.mean(rates))
            asked = "any node" if repeats else "new nodes"
            print(
                f"{questions} questions about {asked}: fooled {rate:.3f}, accuracy "
                f"{1 - rate / 2:.3f}"
            )


if __name__ == "__main__":
    main()
