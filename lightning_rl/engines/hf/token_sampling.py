"""Sampling of a token for each row, from the distribution that its request asks for."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl.engines.hf.requests import DecodeRequest
from lightning_rl.engines.sampling import Sampling


def draw(
    logits: Tensor, rows: Sequence[DecodeRequest], ends: list[int]
) -> tuple[list[int], list[float]]:
    """Sample a token for each row; return it with its logprob under the sampled distribution.

    ``logits`` (N, V) are in float32. Tokens are sampled by inverting the cumulative distribution at
    a number from the row's own generator, so a row does not depend on the others.
    """
    alike: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        s = row.sampling
        alike[s.temperature, s.top_k, s.top_p, s.min_p].append(place)
    logits = _restrained(logits, rows, ends)
    tokens, logprobs = [0] * len(rows), [0.0] * len(rows)
    for places in alike.values():
        own = logits if len(places) == len(rows) else logits[places]
        chosen = [rows[place] for place in places]
        drawn, scores = _draw_alike(own, chosen)
        for place, token, score in zip(places, drawn.tolist(), scores.tolist(), strict=True):
            tokens[place], logprobs[place] = token, score
    return tokens, logprobs


def _draw_alike(logits: Tensor, rows: Sequence[DecodeRequest]) -> tuple[Tensor, Tensor]:
    """Sample for rows with equal settings; return tokens (n,) and logprobs (n,)."""
    sampling = rows[0].sampling
    if sampling.temperature == 0:
        logprobs, tokens = logits.log_softmax(-1), logits.argmax(-1)
    else:
        logprobs = _filtered(logits / sampling.temperature, sampling).log_softmax(-1)
        passed = logprobs.exp().cumsum(-1)
        numbers = torch.tensor([row.random.random() for row in rows], device=logits.device)
        # Of what rounding leaves beyond the last token that can be drawn, take the likeliest.
        tokens = torch.searchsorted(passed, numbers[:, None] * passed[:, -1:], right=True)[:, 0]
        tokens = torch.where(tokens < logits.shape[-1], tokens, logprobs.argmax(-1))
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _restrained(logits: Tensor, rows: Sequence[DecodeRequest], ends: list[int]) -> Tensor:
    """Return logits with end tokens suppressed and penalties applied, where rows ask for it."""
    held = [p for p, row in enumerate(rows) if len(row.tokens) < row.sampling.min_tokens]
    penalized = [place for place, row in enumerate(rows) if row.sampling.distribution.penalizes]
    if not held and not penalized:
        return logits
    logits = logits.clone()
    if held:
        logits[torch.tensor(held)[:, None], torch.tensor(ends)] = -torch.inf
    for place in penalized:
        logits[place] = _penalized(logits[place], rows[place])
    return logits


def _penalized(logits: Tensor, row: DecodeRequest) -> Tensor:
    """Return logits (V,), penalized for tokens of the prompt or completion, as vLLM does."""
    sampling = row.sampling
    logits = logits.clone()
    seen = torch.tensor([*row.prompt, *row.tokens], device=logits.device).unique()
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = torch.tensor(row.tokens, device=logits.device, dtype=torch.long).bincount(
        minlength=len(logits)
    )
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits (n, V), filtered by min-p, top-k and top-p."""
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        least = sampling.min_p * probs.amax(-1, keepdim=True)
        logits = logits.masked_fill(probs < least, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        # Keep tokens until the mass before them reaches top_p, so always the likeliest one.
        outside = probs.cumsum(-1) - probs >= sampling.top_p
        logits = ordered.masked_fill(outside, -torch.inf).gather(-1, order.argsort())
    return logits
