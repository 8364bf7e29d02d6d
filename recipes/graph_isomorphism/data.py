"""Make pairs of graphs, isomorphic or not, that only the whole of both tells apart.

Graphs come as twins: two that are not isomorphic, and have the same degrees. A pair is either of
them beside itself, or beside its twin, both with their nodes in random order. So either graph
alone, and everything that twins share, says nothing about the label.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal
from zlib import crc32

import numpy as np

from lightning_rl.errors import ConfigError, require_at_least

Kind = Literal["random", "regular"]
SPLITS = ("train", "test")
"""A graph is in one of them by its certificate: no number, order or seed makes them meet."""
TRIES = 10_000
"""Draws in a row without a new graph, after which there are no more."""


@dataclass(frozen=True)
class Twins:
    """Holds M twins: ``graphs`` (M, 2, N, N), bytes of 0 and 1, padded; ``sizes`` (M,), their
    nodes.
    """

    graphs: np.ndarray
    sizes: np.ndarray


@cache
def twins(
    split: str, count: int, nodes: tuple[int, int], kind: Kind = "random", seed: int = 0
) -> Twins:
    """Return ``count`` twins of a split; no two of their graphs are isomorphic, in any split.

    Args:
        split: ``train`` or ``test``; each graph, in whatever order, belongs to one of them.
        count: how many.
        nodes: fewest and most nodes.
        kind: ``random`` graphs of density 1/2, or 4-``regular`` ones, which no number of rounds of
            Weisfeiler and Leman's refinement of colours tells apart.
        seed: of all of them.

    Raises:
        ConfigError: for values out of range; where there are not so many such graphs.
    """
    require_at_least(1, count=count)
    low, high = nodes
    if not 6 <= low <= high <= 16:
        raise ConfigError(f"nodes={list(nodes)}: expected 6 <= fewest <= most <= 16")
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} must be one of {', '.join(SPLITS)}")
    number = SPLITS.index(split)
    rng = np.random.default_rng([seed, number])
    graphs = np.zeros((count, 2, high, high), np.uint8)
    sizes = np.zeros(count, np.int64)
    seen: set[int] = set()
    made = failed = 0
    while made < count:
        size = int(rng.integers(low, high + 1))
        graph = _drawn(size, kind, rng)
        twin = switched(graph, rng)
        marks = {certificate(graph), certificate(twin)}
        fresh = len(marks) == 2 and not marks & seen and all(m % 2 == number for m in marks)
        if fresh and not isomorphic(graph, twin):
            graphs[made, 0, :size, :size], graphs[made, 1, :size, :size] = graph, twin
            sizes[made] = size
            seen |= marks
            made, failed = made + 1, 0
            continue
        failed += 1
        if failed == TRIES:
            raise ConfigError(
                f"count={count}: there are hardly more than {made} twins of {kind} graphs with "
                f"{low} to {high} nodes; lower it, or raise nodes"
            )
    return Twins(graphs, sizes)


def _drawn(size: int, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    if kind == "random":
        upper = np.triu(rng.random((size, size)) < 0.5, 1)
        return (upper | upper.T).astype(np.uint8)
    ring = np.zeros((size, size), np.uint8)
    for step in (1, 2):
        ring[np.arange(size), (np.arange(size) + step) % size] = 1
    return switched(ring | ring.T, rng)


def switched(graph: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Switch edges a-b and c-d to a-d and c-b, ten times for each, which keeps the degrees."""
    near, edges = graph.tolist(), np.argwhere(np.triu(graph, 1)).tolist()
    tries = 10 * len(edges)
    draws = rng.integers(max(len(edges), 1), size=(tries, 2)).tolist()
    for (first, second), turned in zip(draws, rng.integers(2, size=tries).tolist(), strict=True):
        (a, b), (c, d) = edges[first], edges[second][:: -1 if turned else 1]
        if len({a, b, c, d}) < 4 or near[a][d] or near[c][b]:
            continue
        near[a][b] = near[b][a] = near[c][d] = near[d][c] = 0
        near[a][d] = near[d][a] = near[c][b] = near[b][c] = 1
        edges[first], edges[second] = [a, d], [c, b]
    return np.array(near, np.uint8)


def walks(graph: np.ndarray, longest: int = 6) -> np.ndarray:
    """Count the closed walks of 2 to ``longest`` steps from each node, (n, longest - 1)."""
    power, rows = graph.astype(np.int64), []
    for _ in range(2, longest + 1):
        power = power @ graph
        rows.append(np.diag(power))
    return np.stack(rows, 1)


def certificate(graph: np.ndarray) -> int:
    """Return a number that isomorphic graphs share, and others hardly ever do."""
    rows = walks(graph)
    return crc32(rows[np.lexsort(rows.T)].tobytes())


def isomorphic(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether some order of the second's nodes makes it the first, exactly."""
    kinds, others = walks(first), walks(second)
    rows = [np.flatnonzero((others == kind).all(1)) for kind in kinds]
    # Nodes with few counterparts first: most searches end at once.
    order = np.argsort([len(row) for row in rows], kind="stable")

    def extends(image: list[int]) -> bool:
        if len(image) == len(order):
            return True
        node, known = order[len(image)], order[: len(image)]
        return any(
            extends([*image, other])
            for other in rows[node].tolist()
            if other not in image and (first[node, known] == second[other, image]).all()
        )

    return first.shape == second.shape and extends([])
