"""Averages over tokens, packs and ranks, kept on the device until an iteration is over."""

import math

import torch
from torch import Tensor

from lightning_rl.dist import all_max, all_sum


class TokenMetrics:
    """Accumulates per-token tensors; means do not depend on how tokens were cut into packs.

    A name that ends in ``_max`` is the maximum instead. What no rank has a value of is left out.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add tensors of shape (M,) each; empty ones make a name known, as all ranks must."""
        for name, values in metrics.items():
            values = values.detach().float()
            if name.endswith("_max"):
                peak = values.max() if values.numel() else values.new_tensor(-math.inf)
                known = self._maxima.get(name)
                self._maxima[name] = peak if known is None else torch.maximum(known, peak)
            else:
                known = self._sums.get(name)
                self._sums[name] = values.sum() if known is None else known + values.sum()
                self._counts[name] = self._counts.get(name, 0) + values.numel()

    def compute(self) -> dict[str, float]:
        """Means and maxima over everything added on every rank."""
        result: dict[str, float] = {}
        if self._sums:
            sums = torch.stack(list(self._sums.values())).double()
            counts = torch.tensor(list(self._counts.values()), device=sums.device).double()
            totals = all_sum(torch.stack([sums, counts]))
            for name, total, count in zip(self._sums, *totals.tolist(), strict=True):
                if count:
                    result[name] = total / count
        if self._maxima:
            peaks = all_max(torch.stack(list(self._maxima.values())))
            for name, value in zip(self._maxima, peaks.tolist(), strict=True):
                if value != -math.inf:  # nan stays: it is what one wants to see
                    result[name] = value
        return result


def summarize(values: list[float]) -> tuple[float, float]:
    """Mean and (biased) standard deviation; nan for an empty list."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
