"""A micro-batch's rollouts one a line, for models that cannot compute packed rows.

They mix tokens outside of attention, by convolutions or states that are carried on, or attend in a
way of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rl.models.attention.batches import Segments, joined, places_of


@dataclass(frozen=True)
class Lines:
    """N rollouts of at most L tokens, each after its prompt and padded on the right.

    ``source`` (N, L): the index of each token in a micro-batch's row of S tokens; padding repeats a
    line's first token, and no token before it sees it. ``place`` (S,): the index of each of the
    row's tokens among the N x L; tokens of a shared prompt are in the line of its first rollout.
    """

    source: Tensor
    place: Tensor

    def to(self, device: torch.device) -> "Lines":
        """Copy to another device."""
        return Lines(*(x.to(device, non_blocking=True) for x in (self.source, self.place)))


def lines_of(segments: Segments) -> Lines:
    """Return the lines of a micro-batch's segments, on the CPU, each with its prompt."""
    prompt, count = segments.prompt, segments.prompts
    number = torch.arange(len(prompt), device="cpu")
    first = torch.full((count,), len(prompt), dtype=torch.long, device="cpu")
    first.scatter_reduce_(0, prompt, number, "amin")
    is_first = first[prompt] == number
    # A completion of one token has none that is computed.
    chosen = is_first | (segments.length[count:] > 0)
    spans = *segments.prefix, segments.start[count:], segments.length[count:]
    token, in_prompt = joined(*(span[chosen] for span in spans))
    elsewhere = in_prompt & ~is_first[chosen][:, None]
    place = places_of(token.masked_fill(elsewhere, -1).flatten(), int(segments.length.sum()))
    return Lines(torch.where(token < 0, token[:, :1], token), place)
