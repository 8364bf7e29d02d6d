"""TokenMetrics: means and maxima of per-token numbers over micro-batches and ranks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_rl.run.processes.dist import gather


class TokenMetrics:
    """Sums of per-token tensors; means do not depend on how tokens were cut into micro-batches.

    For names that end in ``_max`` it is the maximum instead. Names without a value on any rank are
    left out. Ranks may know different names, since their rollouts differ.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add tensors of shape (M,) each, which may be empty."""
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

    def include(self, other: "TokenMetrics") -> None:
        """Add all values of another one."""
        for name, total in other._sums.items():
            known = self._sums.get(name)
            self._sums[name] = total if known is None else known + total
            self._counts[name] = self._counts.get(name, 0) + other._counts[name]
        for name, peak in other._maxima.items():
            known = self._maxima.get(name)
            self._maxima[name] = peak if known is None else torch.maximum(known, peak)

    def compute(self) -> dict[str, float]:
        """Return means and maxima over everything added on every rank.

        All ranks call it, and all get the same, also where only some of them know a name.
        """
        shares = gather((_numbers(self._sums), self._counts, _numbers(self._maxima)))
        result: dict[str, float] = {}
        for name in _names(sums for sums, _, _ in shares):
            count = sum(counts.get(name, 0) for _, counts, _ in shares)
            if count:
                result[name] = sum(sums.get(name, 0.0) for sums, _, _ in shares) / count
        for name in _names(maxima for _, _, maxima in shares):
            peaks = [maxima.get(name, -math.inf) for _, _, maxima in shares]
            peak = math.nan if any(map(math.isnan, peaks)) else max(peaks)
            if peak != -math.inf:  # nan stays: it is what one wants to see
                result[name] = peak
        return result


def _numbers(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Return the numbers in scalars, which a device is asked for once."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))


def _names(shares: Iterable[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for share in shares for name in share))
