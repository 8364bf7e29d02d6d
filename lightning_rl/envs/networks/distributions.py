"""Lean action distributions: only what acting and learning need.

Each holds parameters of shape (*B, ...) and gives an action per element of B.
``torch.distributions`` offers the same and more, at several times the cost of a step in a small
environment.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class ActionDistribution(ABC):
    """The distribution that a policy head computes from features."""

    @abstractmethod
    def sample(self) -> Tensor:
        """Sample an action per element, with torch's global generator; without gradient."""

    @abstractmethod
    def mode(self) -> Tensor:
        """Return the most likely action, which the greedy policy takes."""

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log probability, or log density, (*B,)."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy in nats, (*B,)."""

    @abstractmethod
    def kl(self, new: Self) -> Tensor:
        """Return KL(self || new), (*B,)."""

    def at(self, places: Tensor) -> Self:
        """Select indices of the first dimension of B."""
        return self._mapped([self], lambda parts: parts[0][places])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate distributions along the first dimension of B."""
        return cls._mapped(parts, lambda tensors: torch.cat(list(tensors)))

    @classmethod
    def _mapped(cls, ours: Sequence[Self], change: Callable[[Sequence[Tensor]], Tensor]) -> Self:
        """Change the tensors that have an entry per element; shared ones, as a spread, stay."""
        parts = {f.name: [getattr(one, f.name) for one in ours] for f in fields(cls)}  # type: ignore[arg-type]
        most = max((p[0].ndim for p in parts.values() if isinstance(p[0], Tensor)), default=0)
        changed: dict[str, Any] = {}
        for name, values in parts.items():
            first = values[0]
            if isinstance(first, ActionDistribution):
                changed[name] = first._mapped(values, change)
            else:
                of_places = isinstance(first, Tensor) and first.ndim == most
                changed[name] = change(values) if of_places else first
        return cls(**changed)


@dataclass(frozen=True)
class Categorical(ActionDistribution):
    """One of n, by ``logits`` (*B, n); ``one_hot`` actions are (*B, n), others (*B,)."""

    logits: Tensor
    one_hot: bool = False

    @property
    def logprobs(self) -> Tensor:
        return F.log_softmax(self.logits, -1)

    def _action(self, index: Tensor) -> Tensor:
        return F.one_hot(index, self.logits.shape[-1]) if self.one_hot else index

    def sample(self) -> Tensor:
        # The largest of logits plus Gumbel noise; the noise is -log of an exponential.
        logits = self.logits.detach()
        return self._action((logits - torch.empty_like(logits).exponential_().log_()).argmax(-1))

    def mode(self) -> Tensor:
        return self._action(self.logits.argmax(-1))

    def log_prob(self, action: Tensor) -> Tensor:
        index = action.argmax(-1) if self.one_hot else action
        return self.logprobs.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        # An action that is masked out has a logprob of -inf, and 0 x -inf is no number.
        logprobs = self.logprobs
        return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)

    def kl(self, new: "Categorical") -> Tensor:
        old, now = self.logprobs, new.logprobs
        least = torch.finfo(old.dtype).min
        return (old.exp() * (old.clamp(min=least) - now.clamp(min=least))).sum(-1)


@dataclass(frozen=True)
class MultiCategorical(ActionDistribution):
    """One of each of ``ns``; ``logits`` (*B, sum of ns), actions (*B, len(ns))."""

    logits: Tensor
    ns: tuple[int, ...] = ()

    def _parts(self) -> list[Categorical]:
        return [Categorical(part) for part in self.logits.split(self.ns, -1)]

    def sample(self) -> Tensor:
        return torch.stack([part.sample() for part in self._parts()], -1)

    def mode(self) -> Tensor:
        return torch.stack([part.mode() for part in self._parts()], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        parts = zip(self._parts(), action.unbind(-1), strict=True)
        return torch.stack([part.log_prob(choice) for part, choice in parts]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self._parts()]).sum(0)

    def kl(self, new: "MultiCategorical") -> Tensor:
        pairs = zip(self._parts(), new._parts(), strict=True)
        return torch.stack([ours.kl(theirs) for ours, theirs in pairs]).sum(0)


@dataclass(frozen=True)
class Bernoulli(ActionDistribution):
    """Independent switches by ``logits`` (*B, n); actions are 0 or 1, (*B, n)."""

    logits: Tensor

    def sample(self) -> Tensor:
        return (torch.rand_like(self.logits) < self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        signs = 2 * action.to(self.logits.dtype) - 1
        return F.logsigmoid(signs * self.logits).sum(-1)

    def entropy(self) -> Tensor:
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        return -(on.exp() * on + off.exp() * off).sum(-1)

    def kl(self, new: "Bernoulli") -> Tensor:
        ours = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        theirs = F.logsigmoid(new.logits), F.logsigmoid(-new.logits)
        parts = (a.exp() * (a - b) for a, b in zip(ours, theirs, strict=True))
        return torch.stack(list(parts)).sum(0).sum(-1)


@dataclass(frozen=True)
class Gaussian(ActionDistribution):
    """Independent normals, ``mean`` and ``log_std`` (*B, D); the environment clips actions out of
    bounds.
    """

    mean: Tensor
    log_std: Tensor

    @torch.no_grad()
    def sample(self) -> Tensor:
        return torch.addcmul(self.mean, torch.randn_like(self.mean), self.log_std.exp())

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        return -(0.5 * z * z + self.log_std + _LOG_SQRT_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + _LOG_SQRT_2PI).expand_as(self.mean).sum(-1)

    def kl(self, new: "Gaussian") -> Tensor:
        ratio = (2 * (self.log_std - new.log_std)).exp()
        moved = (self.mean - new.mean) * (-new.log_std).exp()
        return (0.5 * (ratio + moved * moved - 1) + new.log_std - self.log_std).sum(-1)


@dataclass(frozen=True)
class TanhGaussian(ActionDistribution):
    """A :class:`Gaussian` squashed by tanh into [low, high] (Haarnoja et al. 2018, SAC, app. C).

    Its entropy and KL have no closed form: ``entropy`` is an estimate from one sample with
    gradient, ``kl`` is that of the unsquashed Gaussians, which is equal.
    """

    mean: Tensor
    log_std: Tensor
    low: Tensor
    high: Tensor

    def _base(self) -> Gaussian:
        return Gaussian(self.mean, self.log_std)

    def _squashed(self, raw: Tensor) -> Tensor:
        return self.low + 0.5 * (raw.tanh() + 1) * (self.high - self.low)

    def sample(self) -> Tensor:
        with torch.no_grad():
            return self._squashed(self._base().sample())

    def rsample_and_log_prob(self, sample_shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return an action and its log density, both with gradient (SAC's reparameterisation)."""
        raw = self.mean + torch.randn_like(self.mean) * self.log_std.exp()
        return self._squashed(raw), self._log_prob(raw)

    def mode(self) -> Tensor:
        return self._squashed(self.mean)

    def log_prob(self, action: Tensor) -> Tensor:
        unit = 2 * (action - self.low) / (self.high - self.low) - 1
        # float32's tanh reaches 1 at 9: what was squashed further cannot be told from the bound.
        return self._log_prob(unit.clamp(-1 + 1e-6, 1 - 1e-6).atanh())

    def _log_prob(self, raw: Tensor) -> Tensor:
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), without cancellation.
        slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        scale = (0.5 * (self.high - self.low)).log()
        return self._base().log_prob(raw) - (slope + scale).sum(-1)

    def entropy(self) -> Tensor:
        return -self.rsample_and_log_prob()[1]

    def kl(self, new: "TanhGaussian") -> Tensor:
        return self._base().kl(new._base())
