"""Requests to an engine, and their answers: sampling settings, seeds and completions."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import SAMPLED_BY, SamplingDistribution


@configurable
@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on completions, enforced token by token. Set exactly one; names are vLLM's.

    Args:
        choice: the completion is one of these texts.
        regex: the completion matches this regular expression.
        json: the completion is a JSON value that fits this JSON schema (a mapping, or its text).
        grammar: the completion is a word of this context-free grammar, in EBNF.

    Raises:
        ConfigError: unless exactly one is given.
    """

    choice: list[str] | None = None
    regex: str | None = None
    json: dict[str, Any] | str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = self.as_dict()
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {sorted(given) or 'nothing'}; give exactly one of choice, "
                "regex, json and grammar"
            )
        if self.choice == []:
            raise ConfigError("structured_outputs.choice=[] allows nothing; list the choices")

    def as_dict(self) -> dict[str, Any]:
        """Return the constraint, under the names of vLLM's ``StructuredOutputsParams``."""
        return {name: value for name, value in asdict(self).items() if value is not None}


LEAST_TEMPERATURE = 0.01
"""The lowest temperature of vLLM, which raises lower ones to it, with a warning."""


@configurable
@dataclass(frozen=True)
class Sampling:
    """Settings of the distribution that completions are sampled from.

    Args:
        max_tokens: maximum number of new tokens.
        temperature: sampling temperature; 0 is greedy, otherwise at least 0.01.
        top_p: nucleus mass, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens whose probability is below this share of the most likely one's.
        repetition_penalty: above 1, tokens of the prompt or the completion become less likely; 1
            has no effect.
        presence_penalty: subtracted from the logits of tokens already generated.
        frequency_penalty: subtracted from their logits once per occurrence.
        structured_outputs: constraint on completions, for evaluations only; None: no constraint.
        min_tokens: suppress end tokens until this many tokens are generated.
        stop: strings that end a completion (kept in its tokens).
        priority: waiting requests with the lowest value go first, if the engine supports it.

    Raises:
        ConfigError: for a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    structured_outputs: StructuredOutputs | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    priority: int = 0

    def __post_init__(self) -> None:
        for name, ok, bound in (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            (
                "temperature",
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf,
                "0 (greedy), or finite and >= 0.01, since vLLM raises lower ones to that, and "
                "rollouts would be scored at another temperature than they were sampled at",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps all tokens)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "> 0 (1 changes nothing)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "in [0, max_tokens]"),
        ):
            if not ok:
                raise ConfigError(f"sampling.{name}={getattr(self, name)} must be {bound}")

    @cached_property
    def distribution(self) -> SamplingDistribution:
        """The settings that change the sampled distribution, which rollouts record."""
        return SamplingDistribution(**{name: getattr(self, name) for name in SAMPLED_BY})

    def of(self, distribution: SamplingDistribution) -> "Sampling":
        """Return a copy with the same limits that samples from another distribution."""
        return replace(self, **asdict(distribution))

    def of_vllm(self, seed: int) -> dict[str, Any]:
        """Return the fields of vLLM's sampling parameters, for a request with this seed."""
        given = {name: getattr(self, name) for name in (*SAMPLED_BY, "max_tokens", "stop")}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.as_dict()
        # Exactly the sampled token's logprob; texts only where they may end it.
        return given | {"seed": seed, "logprobs": 0, "detokenize": bool(self.stop)}


@dataclass(slots=True)
class Completion:
    """One engine output. ``token_ids`` include the end token if the model wrote it.

    ``logprobs`` are of the distribution that was sampled from (after penalties, temperature, min-p,
    top-k, top-p); ``finish_reason`` is ``stop``, ``length`` or ``abort``; ``versions`` holds, per
    token, the weight version that wrote it. ``routed_experts`` are those of the prompt and all
    tokens but the last (:mod:`lightning_rl.data.routing`), if the engine was asked to record them.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[int]
    routed_experts: str = ""


def request_seed(run_seed: int, prompt_id: str, sample_index: int, iteration: int) -> int:
    """Return a rollout's own 63-bit seed, so that any rollout can be generated again."""
    return seed_of(f"{run_seed}/{prompt_id}/{sample_index}/{iteration}".encode())


def seed_of(key: bytes) -> int:
    """Return the 63-bit seed derived from a key, the same on every machine."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1
