"""Bound how far two float results of one number may be apart, if computed in two orders.

A sum of n terms, rounded after each addition, is off by about sqrt(n) u times the size of what is
added, u half the distance of neighbouring numbers: errors have either sign, and add up as a random
walk does (Higham and Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis", theorem
2.4: beyond LAMBDA sqrt(n) u with a chance of 2 exp(-LAMBDA^2 / 2)). Which order it is depends on
the CPU's vector width and on the shapes of micro-batches, so no test may count on one.

What is at fault in this library when a result differs (a wrong mask, temperature, weight or row) is
off by far more; each test that takes its bound from here plants such a fault too.
"""

import math
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

Model: TypeAlias = "PretrainedConfig | Path | str"
"""A configuration, or the directory it lies in."""

LAMBDA = 5.0
"""A single number exceeds its bound once in 130,000 times, were errors independent."""


def rounding(additions: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Bound on the distance of two results of ``additions`` in a row, of terms of that magnitude.

    Each result may be off by LAMBDA sqrt(n) u, so that both are within twice that; 2 u is eps.
    """
    return LAMBDA * additions**0.5 * torch.finfo(dtype).eps * magnitude


def norm_rounding(additions: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound the norm of a difference, relative to that of the result, likewise.

    Errors of a norm do not average out: one weight, or one normalizer, is in all that follows from
    it. Under other instruction sets and MKL's compatible mode, the gradient of the tests' tiny
    model is up to 2.6e-6 off from that in float64, a third of sqrt(n) eps, so the norm is held to
    the bound of a single number.
    """
    return rounding(additions, dtype=dtype)


def forward_additions(model: Model) -> int:
    """Count additions in a row from a token to a logprob: lengths of sums, layer by layer."""
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    hidden, positions = config.hidden_size, config.max_position_embeddings
    head = hidden // config.num_attention_heads
    norms, projections = 2 * hidden, 3 * hidden  # into attention, out of it, into the MLP
    between = getattr(config, "intermediate_size", 4 * hidden)
    layer = norms + projections + head + 2 * positions + between
    return config.num_hidden_layers * layer + 2 * hidden + config.vocab_size


def scores_rounding(model: Model, *scores: Tensor) -> float:
    """Bound for logprobs, entropies or values, of which the largest is their magnitude.

    A logprob is a logit less the logarithm of a sum over all logits, and both are off by as much.
    """
    magnitude = max(1.0, *(float(part.detach().abs().max()) for part in scores))
    return 2 * rounding(forward_additions(model), magnitude)


def bfloat16_rounding(model: Model, magnitude: float) -> float:
    """Bound for logprobs of that magnitude, where all products take and give bfloat16.

    They add in float32, so what counts is how often a number is rounded on its way from a token to
    a logprob: twice in each of the six products of a layer (projection, scores,
    values, output, and the MLP's two), and in the head.
    """
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    return rounding(2 * (6 * config.num_hidden_layers + 1), magnitude, torch.bfloat16)


def gradient_rounding(model: Model, tokens: int) -> float:
    """Bound a gradient's relative norm: there, back twice as far, and summed over tokens.

    A gradient is made of probabilities, and a probability is off, relatively, by what its logprob
    is off absolutely, which grows with the logprob; that of a guess is its magnitude here. The
    bound is for weights after one plain gradient step too, of which the gradient is a part.
    """
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    return math.log(config.vocab_size) * norm_rounding(3 * forward_additions(config) + tokens)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference over the norm of ``theirs``."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
