"""Turn what prover and verifier see of two graphs, and of what was said, into tensors.

E interactions side by side, two graphs of up to N nodes each, R rounds. A node is a number: those
of the first graph are 0 to N - 1, of the second N to 2N - 1. A message is a node, or -1: none yet.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS = 6
"""Longest walks that the prover counts."""
NODE_FEATURES = STEPS
FACTS = 6


def node_features(graphs: Tensor) -> Tensor:
    """Return each node's degree as a share of N, and the return probabilities of its random walks.

    (*B, N, N) to (*B, N, 6).
    """
    degrees = graphs.sum(-1, keepdim=True)
    steps, power = graphs / degrees.clamp(min=1), None
    rows = [degrees.squeeze(-1) / graphs.shape[-1]]
    for _ in range(1, STEPS):
        power = steps @ (steps if power is None else power)
        rows.append(power.diagonal(dim1=-2, dim2=-1))
    return torch.stack(rows, -1)


def union(graphs: Tensor) -> Tensor:
    """Return two graphs as one without edges between them, (E, 2, N, N) to (E, 2N, 2N)."""
    count, _, nodes, _ = graphs.shape
    both = graphs.new_zeros(count, 2 * nodes, 2 * nodes)
    both[:, :nodes, :nodes], both[:, nodes:, nodes:] = graphs[:, 0], graphs[:, 1]
    return both


def pointed_at(messages: Tensor, nodes: int) -> Tensor:
    """Mark which node was named in which round, (E, R) to (E, 2N, R), 0 or 1."""
    marks = F.one_hot(messages.clamp(min=0), 2 * nodes) * (messages >= 0).unsqueeze(-1)
    return marks.transpose(1, 2).float()


def said(messages: Tensor, graphs: Tensor) -> Tensor:
    """Return each message's graph, -1 or 1, and its node's degree; 0 where there is none yet.

    (E, R) to (E, R, 2).
    """
    nodes = graphs.shape[-1]
    degrees = graphs.sum(-1).flatten(1).gather(1, messages.clamp(min=0))
    told = torch.stack([torch.where(messages < nodes, -1.0, 1.0), degrees], -1)
    return told * (messages >= 0).unsqueeze(-1)


def claims(questions: Tensor, answers: Tensor, graphs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a verifier learns from X questions and their answers, each (E, X).

    An answer in the other graph claims that its node corresponds to the one asked for. Returns
    which are such claims, (E, X), and for each two of them, also of a claim with itself,
    (E, X, X, 6): whether the two nodes in the first graph are the same, whether they are
    neighbours, how many neighbours they share; and how much more each of that is in the second.
    """
    nodes = graphs.shape[-1]
    made = (questions >= 0) & (answers >= 0) & ((questions < nodes) != (answers < nodes))
    in_first = torch.where(questions < nodes, questions, answers)
    in_second = torch.where(questions < nodes, answers, questions) - nodes
    places = torch.stack([in_first, in_second], 1).masked_fill(~made.unsqueeze(1), 0)
    same = places.unsqueeze(-1) == places.unsqueeze(-2)
    facts = torch.stack([same.float(), _at(graphs, places), _at(graphs @ graphs, places)], -1)
    facts = facts * (made.unsqueeze(-1) & made.unsqueeze(-2))[:, None, :, :, None]
    return made.float(), torch.cat([facts[:, 0], facts[:, 1] - facts[:, 0]], -1)


def _at(matrix: Tensor, places: Tensor) -> Tensor:
    """Return entries of (E, 2, N, N) at all pairs of places (E, 2, X)."""
    count = places.shape[-1]
    rows = matrix.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, matrix.shape[-1]))
    return rows.gather(3, places.unsqueeze(-2).expand(-1, -1, count, -1))
