"""Penalties on what was written before, computed anew for tokens that were sampled under them."""

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.data.packing import token_rows


@dataclass(frozen=True)
class Penalties:
    """How engines changed the logits that M tokens were sampled from.

    Token i came after ``input_ids[begin[i]:end[i]]``, of which its own turn has written what begins
    at ``turn[i]``; before that is the engine's prompt. ``input_ids`` (T,); all others (M,).
    """

    input_ids: Tensor
    begin: Tensor
    turn: Tensor
    end: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def rows(self, part: slice) -> "Penalties":
        """Those of some of the M tokens."""
        names = ("begin", "turn", "end", "repetition", "presence", "frequency")
        return replace(self, **{name: getattr(self, name)[part] for name in names})

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits (M, V) in place; returns the slope (M, V), d changed / d logits.

        As vLLM: those of all tokens seen, prompt included, are divided by ``repetition`` if
        positive, else multiplied (Keskar et al. 2019, CTRL, section 4.1); then ``frequency`` is
        subtracted for each time that a token was written, and ``presence`` once.
        """
        seen, counts = self._seen(logits.shape[1])
        repetition = self.repetition[:, None]
        slope = torch.where(logits > 0, 1 / repetition, repetition).masked_fill_(~seen, 1.0)
        # Divided, not multiplied by the slope: so both sides round alike.
        changed = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, changed, logits))
        logits -= self.frequency[:, None] * counts
        logits -= self.presence[:, None] * (counts > 0)
        return slope

    def _seen(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Which tokens (M, V) each had before it, and how often its turn had written each."""
        width = max(1, int((self.end - self.begin).max()))
        places = self.begin[:, None] + torch.arange(width, device=self.begin.device)
        before = places < self.end[:, None]
        ids = self.input_ids[places.clamp(max=len(self.input_ids) - 1)]
        # One more column takes what is none of a token's own past.
        seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
        seen.scatter_(1, ids.where(before, vocabulary), True)
        written = (before & (places >= self.turn[:, None])).float()
        counts = torch.zeros(len(ids), vocabulary + 1, device=ids.device)
        counts.scatter_add_(1, ids, written)
        return seen[:, :-1], counts[:, :-1]


def penalties_of(pack: TensorDict, live: Tensor) -> Penalties | None:
    """Of the tokens ``live`` (M,) of a pack; None where none was sampled under any."""
    if "turn_start" not in pack["tokens"]:
        return None
    rows, tokens, length = token_rows(pack)[live], pack["tokens"], pack["rollouts", "length"]
    begin = (length.cumsum(0) - length)[rows]
    rollouts = pack["rollouts"][rows]
    return Penalties(
        tokens["input_ids"],
        begin,
        begin + tokens["turn_start"][live],
        live,
        rollouts["repetition_penalty"],
        rollouts["presence_penalty"],
        rollouts["frequency_penalty"],
    )
