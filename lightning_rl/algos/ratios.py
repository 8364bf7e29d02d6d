"""Ratios of probabilities, from differences of logprobs that may be absurd, and their rows."""

from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""In nats. exp(20) is 5e8: no ratio beyond it means anything, and exp(89) is infinite."""


def ratios(log_ratio: Tensor) -> Tensor:
    """exp of log ratios (M,), taken within ±20, as verl does; no gradient comes from beyond it."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def row_sums(values: Tensor, row: Tensor) -> Tensor:
    """Sum of ``values`` (M,) over the tokens of each token's own rollout, shape (M,)."""
    rows, inverse = row.unique(return_inverse=True)
    return values.new_zeros(len(rows)).index_add(0, inverse, values)[inverse]


def row_means(values: Tensor, row: Tensor) -> Tensor:
    """Mean of ``values`` (M,) over the tokens of each token's own rollout, shape (M,)."""
    _, inverse, counts = row.unique(return_inverse=True, return_counts=True)
    return row_sums(values, row) / counts[inverse]
