"""Exact attention over packed rollouts whose prompts are computed once.

A pack is laid out as one row of S tokens: every distinct prompt once, then each rollout's
completion (without its last token, which predicts nothing). A completion's tokens attend to their
prompt and, causally, to themselves; prompts attend causally to themselves. That equals running each
rollout on its own (Prefix Grouper, arXiv 2506.05433), and nothing is padded outside of attention.

transformers calls :func:`packed_attention` for every layer with the pack's :class:`PackLayout`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AttentionInterface

from lightning_rl.data.packing import token_rows
from lightning_rl.errors import ConfigError
from lightning_rl.models.varlen import Varlen, attend, build_varlen, fused_kernel, varlen_dtype

ATTENTION = "lightning_rl_packed"

# Segments of like length share one SDPA call; more padding than this share opens a new bucket.
MAX_PADDING = 0.3
# Bound on the elements of one bucket's mask (N x Lq x Lk), and so on its memory.
MAX_SCORES = 1 << 24


@dataclass(slots=True)
class Bucket:
    """Segments attended in one SDPA call: N segments, padded to Lq queries and Lk keys.

    ``query`` (N, Lq) and ``key`` (N, Lk) index the pack's S tokens, -1 where padded. ``mask``
    (N, 1, Lq, Lk) is True where a query may look; None means plain causal attention, in which
    padding on the right is never looked at.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None

    def to(self, device: torch.device) -> "Bucket":
        """On another device, with padding pointing at token 0 (its outputs are never read)."""
        mask = None if self.mask is None else self.mask.to(device)
        return Bucket(self.query.clamp(min=0).to(device), self.key.clamp(min=0).to(device), mask)


@dataclass(slots=True)
class PackLayout:
    """Where each token of a pack sits in the forward pass.

    ``input_ids`` and ``position_ids`` (S,) feed the model; ``live`` (M,) are the loss tokens as
    indices into the pack's T tokens, ``predictors`` (M,) the positions in S that predict them.
    ``restore`` (S,) picks each token's output from the flattened, concatenated bucket outputs;
    ``varlen`` describes the same attention for a fused kernel.
    """

    input_ids: Tensor
    position_ids: Tensor
    live: Tensor
    predictors: Tensor
    buckets: list[Bucket]
    restore: Tensor
    varlen: Varlen


def build_layout(pack: TensorDict) -> PackLayout:
    """Lay out a pack (see :mod:`lightning_rl.data.packing`) for :func:`packed_attention`."""
    device = pack["tokens", "input_ids"].device
    rollouts = pack["rollouts"].cpu()
    length, prompt_length = rollouts["length"], rollouts["prompt_length"]
    start = length.cumsum(0) - length
    prefixes, prefix = rollouts["prefix"].unique(return_inverse=True)
    owner = torch.empty_like(prefixes)
    owner[prefix] = torch.arange(len(length))  # any row with that prompt will do

    # Segments of the forward row: the distinct prompts, then the completions less their last token.
    segment_length = torch.cat([prompt_length[owner], length - prompt_length - 1])
    segment_start = segment_length.cumsum(0) - segment_length
    prefix_start, suffix_start = segment_start.split([len(prefixes), len(length)])
    prefix_start = prefix_start[prefix]
    first_token = torch.cat([start[owner], start + prompt_length])
    first_position = torch.cat([torch.zeros_like(owner), prompt_length])
    within = _ranges(segment_length)
    tokens = (torch.repeat_interleave(first_token, segment_length) + within).to(device)
    positions = torch.repeat_interleave(first_position, segment_length) + within

    live = pack["tokens", "loss_mask"].nonzero().squeeze(1)
    row = token_rows(pack)[live].cpu()
    offset = live.cpu() - start[row] - 1  # of the predicting token within its rollout
    in_prompt = offset < prompt_length[row]
    predictors = torch.where(
        in_prompt, prefix_start[row] + offset, suffix_start[row] + offset - prompt_length[row]
    )

    count = len(prefixes)
    buckets = [
        _causal_bucket(segment_start[part], segment_length[part])
        for part in _buckets(segment_length[:count], torch.zeros(count, dtype=torch.long))
    ] + [
        _suffix_bucket(
            suffix_start[part],
            segment_length[count:][part],
            prefix_start[part],
            prompt_length[part],
        )
        for part in _buckets(segment_length[count:], prompt_length)
    ]
    slots = torch.cat([bucket.query.flatten() for bucket in buckets])
    restore = torch.empty(len(within), dtype=torch.long)
    restore[slots[slots >= 0]] = (slots >= 0).nonzero().squeeze(1)
    return PackLayout(
        input_ids=pack["tokens", "input_ids"][tokens],
        position_ids=positions.to(device),
        live=live,
        predictors=predictors.to(device),
        buckets=[bucket.to(device) for bucket in buckets],
        restore=restore.to(device),
        varlen=build_varlen(
            segment_start,
            segment_length,
            torch.cat([torch.zeros(count, dtype=torch.long), prefix_start]),
            torch.cat([torch.zeros(count, dtype=torch.long), prompt_length]),
        ).to(device),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unsupported: object,
) -> tuple[Tensor, None]:
    """Attention of one layer over a pack: q (1, H, S, D), k and v (1, Hkv, S, D) to (1, S, H, D).

    Raises:
        ConfigError: if the model's attention has a feature that this function would ignore, or a
            rollout is longer than its sliding window.
    """
    _refuse(module, layout, sliding_window, unsupported)
    # Token-major rows make every gather below a copy of whole rows.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    dtype = None if dropout else varlen_dtype(query)
    if dtype is not None:
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out = attend(q, k, v, layout.varlen, scaling, fused_kernel())
        return out[None], None
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for bucket in layout.buckets:
        out = F.scaled_dot_product_attention(
            _gather(q, bucket.query),
            _gather(k, bucket.key).repeat_interleave(repeats, 1),
            _gather(v, bucket.key).repeat_interleave(repeats, 1),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            dropout_p=dropout,
            scale=scaling,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[layout.restore][None], None


AttentionInterface.register(ATTENTION, packed_attention)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (S, H, D) at index (N, L), as (N, H, L, D)."""
    rows = F.embedding(index, x.flatten(1))  # its backward is much faster than indexing's
    return rows.unflatten(-1, x.shape[1:]).transpose(1, 2)


def _refuse(
    module: nn.Module, layout: PackLayout, window: int | None, features: dict[str, object]
) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if features.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}, which packed attention does not compute; "
                "use a model without it"
            )
    if window is not None and len(layout.position_ids):
        longest = int(layout.position_ids.max()) + 1
        if longest > window:
            raise ConfigError(
                f"a rollout of {longest} tokens exceeds the model's sliding window of {window}; "
                "lower sampling.max_tokens or drop longer prompts"
            )


def _ranges(lengths: Tensor) -> Tensor:
    """[0..a), [0..b), ... concatenated, for lengths (a, b, ...)."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(ends - lengths, lengths)


def _buckets(length: Tensor, prefix: Tensor) -> list[Tensor]:
    """Cut segments, sorted by size, where padding or the score matrix would grow too large."""
    parts: list[list[int]] = []
    lengths, prefixes = length.tolist(), prefix.tolist()
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i] + prefixes[i], lengths[i]))
    real = lq = lp = 0
    for i in order:
        if lengths[i] == 0:  # a one-token completion has no token to run
            continue
        lq, lp = max(lq, lengths[i]), max(lp, prefixes[i])
        real += lengths[i] + prefixes[i]
        count = len(parts[-1]) + 1 if parts else 0
        padded = count * (lq + lp)
        if not parts or padded > (1 + MAX_PADDING) * real or count * lq * (lq + lp) > MAX_SCORES:
            parts.append([])
            lq, lp, real = lengths[i], prefixes[i], lengths[i] + prefixes[i]
        parts[-1].append(i)
    return [torch.tensor(part) for part in parts]


def _index(start: Tensor, length: Tensor) -> Tensor:
    """Consecutive positions per segment, padded with -1 on the right: (N, max length)."""
    steps = torch.arange(int(length.max()))
    return torch.where(steps < length[:, None], start[:, None] + steps, -1)


def _causal_bucket(start: Tensor, length: Tensor) -> Bucket:
    index = _index(start, length)
    return Bucket(index, index, None)


def _suffix_bucket(
    start: Tensor, length: Tensor, prefix_start: Tensor, prefix_length: Tensor
) -> Bucket:
    query = _index(start, length)
    prefix = _index(prefix_start, prefix_length)
    steps = torch.arange(query.shape[1])
    causal = (steps[:, None] >= steps).expand(len(start), -1, -1)
    seen = (prefix >= 0)[:, None].expand(-1, query.shape[1], -1)
    return Bucket(query, torch.cat([prefix, query], 1), torch.cat([seen, causal], 2)[:, None])
