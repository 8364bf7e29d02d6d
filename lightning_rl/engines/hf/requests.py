"""DecodeRequest: a request to a decoder, with its tokens so far."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rl.data.routing import to_text
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Placed
from lightning_rl.vision.pictured_text import PicturedText


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request with its tokens so far; each token has the version that generated it.

    ``writer`` is the engine, or one of its policies, whose weights generate it.
    """

    writer: Engine
    prompt: list[int]
    sampling: Sampling
    random: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None
    """Why it ended; None: it has not ended."""
    cached: int = -1
    """The weight version of its keys and values in the cache."""
    pictures: tuple[Placed, ...] = ()
    """The pictures of its prompt."""
    seen: PicturedText | None = None
    """Its text with pictures, and the tokens' positions; None: it has no pictures."""
    routed: list[Tensor] = field(default_factory=list)
    """Experts (T, L, K) of its first tokens, in parts, if they are recorded."""

    @property
    def text(self) -> list[int]:
        """The tokens of prompt and completion."""
        return [*self.prompt, *self.tokens]

    def completion(self) -> Completion:
        """Return the completion, as an engine answers it."""
        experts = to_text(torch.cat(self.routed)) if self.routed else ""
        return Completion(self.tokens, self.logprobs, str(self.reason), self.versions, experts)
