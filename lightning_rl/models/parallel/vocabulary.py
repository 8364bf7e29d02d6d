"""The policy head's vocabulary: whole, or each rank's part of it.

From a chunk of logits come few numbers a token: the largest, the sum of exponentials, the
targets' logits, and the sum of logits weighted by their exponentials. Those of a vocabulary's parts
add up to those of the whole, so no rank ever has another's logits.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_rl.errors import ConfigError
from lightning_rl.models.parallel.tensor import TensorRanks, local, within
from lightning_rl.models.sampling import SampledBy


class Sums(NamedTuple):
    """The numbers that the logprobs and entropies of M tokens with logits z are computed from.

    ``top`` (M,) is max z, ``total`` (M,) the sum of exp(z - top), ``picked`` (M, N) the z of the
    targets, and ``weighted`` (M,) the sum of exp(z - top) z.
    """

    top: Tensor
    total: Tensor
    picked: Tensor
    weighted: Tensor


class Vocabulary:
    """All of it on this rank."""

    def matrix(self, output: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Weight (V, D) and bias (V,) of the output head that make this rank's logits."""
        return output.weight, output.bias

    def settings(self, by: SampledBy) -> SampledBy:
        """How tokens were sampled, as far as this rank's logits are concerned."""
        return by

    def pick(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the logits (m, N) of targets (m, N); 0 where they are another rank's."""
        return logits.gather(-1, targets)

    def add(self, slope: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values (m, N) to a slope (m, v) at targets (m, N), where they are in [0, v)."""
        if torch.compiler.is_compiling() and targets.shape[1] == 1:
            # One kernel with what is before and after it.
            ids = torch.arange(slope.shape[1], device=slope.device)
            slope.add_(torch.where(ids == targets, values, 0.0))
        else:
            own, inside = within(targets, 0, slope.shape[1])
            slope.scatter_add_(-1, own, values.where(inside, 0.0))

    def merged(self, sums: Sums) -> Sums:
        """Return the sums over the whole vocabulary."""
        return sums

    def summed(self, gradient: Tensor) -> Tensor:
        """The whole gradient of states, from that of this rank's logits."""
        return gradient


WHOLE = Vocabulary()


class SplitVocabulary(Vocabulary):
    """A part of it, one of as many as there are ranks.

    Args:
        ranks: that have the others.
        size: tokens of the whole vocabulary.
    """

    def __init__(self, ranks: TensorRanks, size: int) -> None:
        self.ranks, self.count = ranks, size // ranks.size
        self.first = ranks.index * self.count

    def matrix(self, output: nn.Linear) -> tuple[Tensor, Tensor | None]:
        return local(output.weight), None if output.bias is None else local(output.bias)

    def settings(self, by: SampledBy) -> SampledBy:
        """Return the sampling settings for this part of the vocabulary.

        Raises:
            ConfigError: for a cut of the distribution, which takes all logits.
        """
        if by.top_k is not None or by.min_p is not None:
            raise ConfigError(
                f"rollouts were sampled with top_k, top_p or min_p, which cut a whole distribution "
                f"of logits, and with tensor={self.ranks.size} no process has one; set "
                "sampling.top_k: 0, top_p: 1, min_p: 0, or tensor: 1"
            )
        ends, inside = within(by.ends, self.first, self.count)
        penalties = by.penalties
        if penalties is not None:
            # One past the last: a column that takes what is not counted.
            ids, known = within(penalties.input_ids, self.first, self.count)
            penalties = replace(penalties, input_ids=ids.where(known, self.count))
        return replace(by, ends=ends[inside], penalties=penalties)

    def pick(self, logits: Tensor, targets: Tensor) -> Tensor:
        own, inside = within(targets, self.first, self.count)
        return super().pick(logits, own).where(inside, 0.0)

    def add(self, slope: Tensor, targets: Tensor, values: Tensor) -> None:
        super().add(slope, targets - self.first, values)

    def merged(self, sums: Sums) -> Sums:
        top = self.ranks.max(sums.top)
        share = (sums.top - top).exp()
        parts = [sums.total * share, sums.weighted * share, *sums.picked.unbind(-1)]
        total, weighted, *picked = self.ranks.sum(torch.stack(parts))
        return Sums(top, total, torch.stack(picked, -1), weighted)

    def summed(self, gradient: Tensor) -> Tensor:
        return self.ranks.sum(gradient)
