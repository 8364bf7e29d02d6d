"""DecodeRequest: a request of a decoder, and what is written of it."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_rl.data.routing import to_text
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Placed
from lightning_rl.vision.seen import SeenText


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request, and what is written of it. Each token has the version that wrote it.

    ``writer`` is the engine, or the one of its policies, whose weights write it.
    """

    writer: Engine
    prompt: list[int]
    sampling: Sampling
    random: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None
    """Why it is over; None: it is not."""
    cached: int = -1
    """The version whose keys and values of it are in the cache."""
    pictures: tuple[Placed, ...] = ()
    """Those of its prompt."""
    seen: SeenText | None = None
    """What its tokens see, and their positions; None: it has no pictures."""
    routed: list[Tensor] = field(default_factory=list)
    """Experts (T, L, K) of its first tokens, in parts, where these are recorded."""

    @property
    def text(self) -> list[int]:
        """All of its tokens."""
        return [*self.prompt, *self.tokens]

    def completion(self) -> Completion:
        """What an engine answers."""
        experts = to_text(torch.cat(self.routed)) if self.routed else ""
        return Completion(self.tokens, self.logprobs, str(self.reason), self.versions, experts)
