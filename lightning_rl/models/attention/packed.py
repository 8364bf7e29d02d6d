"""Exact attention over packed rollouts whose prompts are computed once.

A micro-batch is laid out as one row of S tokens: every distinct prompt once, then each rollout's
completion (without its last token, which predicts nothing). A completion's tokens attend to their
prompt and, causally, to themselves; prompts attend causally to themselves. That equals running each
rollout on its own (Prefix Grouper, arXiv 2506.05433), and nothing is padded outside of attention.

transformers calls :func:`packed_attention` for every layer with the micro-batch's
:class:`PackLayout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lightning_rl.data.batch import host_of, ranges, token_rows
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.batches import AttentionBatches, Pieces, Segments
from lightning_rl.models.attention.explicit_scores import OpenScores
from lightning_rl.models.attention.short_segments import attend_short, is_short
from lightning_rl.models.attention.unpacked import Lines, lines_of
from lightning_rl.models.attention.varlen import (
    Fused,
    Varlen,
    attend,
    fused_dtype,
    fused_heads,
    fused_kernel,
)
from lightning_rl.models.attention.windows import windowed_batches

ATTENTION = "lightning_rl_packed"


class TokenExchange(Protocol):
    """Exchanges the tensors of attention for a rank that holds s of a micro-batch's tokens."""

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Exchange queries, keys and values (s, H, D) of own tokens for those to attend with.

        Return queries (Q, H', D), and keys and values (K, Hkv', D), of this rank's heads.
        """

    def gather_heads(self, output: Tensor) -> Tensor:
        """Exchange outputs (Q, H', D) of these queries for those (s, H, D) of own tokens."""


class Attending(Protocol):
    """Which of a rank's keys each of its Q queries sees."""

    @property
    def pieces(self) -> Pieces:
        """The same as pieces of segments."""

    def batches(self) -> AttentionBatches:
        """For calls of SDPA."""

    def varlen(self) -> Varlen:
        """For one call of a fused kernel."""


@dataclass
class PackLayout:
    """The place of each token of a micro-batch in the forward pass.

    ``input_ids`` and ``position_ids`` (S,) feed the model. ``tokens`` (S,) are the same tokens, and
    ``live`` (M,) the loss tokens, as indices into the micro-batch's T tokens; ``rows`` (M,) are the
    loss tokens' rollouts, and ``predictors`` (M,) the positions in S that predict them.
    ``segments`` say which tokens see which, and ``longest`` is the largest number of tokens of a
    rollout, without its last. ``fused`` is the part that a fused kernel computes, chosen by
    :meth:`prepare` before a model's layers run; SDPA over ``batches`` computes the rest.
    With ``exchange``, the tokens, ``live``, ``rows`` and ``predictors`` are those of one rank of
    several (:mod:`lightning_rl.models.parallel.sequence`), and only ``segments`` those of the whole
    micro-batch; ``seen`` is what the rank's queries see, None: all are its queries. ``own`` (S,)
    flags the rank's tokens, the rest fills its share up; None: all are.
    """

    input_ids: Tensor
    position_ids: Tensor
    tokens: Tensor
    live: Tensor
    rows: Tensor
    predictors: Tensor
    segments: Segments
    longest: int
    exchange: TokenExchange | None = None
    seen: Attending | None = None
    own: Tensor | None = None
    fused: Fused | None = None
    _windowed: dict[int, AttentionBatches] = field(default_factory=dict)

    @cached_property
    def batches(self) -> AttentionBatches:
        """For calls of SDPA."""
        return (self.seen or self.segments).batches().to(self.input_ids.device)

    def batches_within(self, window: int | None) -> AttentionBatches:
        """Return the batches for layers with a sliding window of ``window`` tokens; None: none."""
        if window is None:
            return self.batches
        if window not in self._windowed:
            made = windowed_batches((self.seen or self.segments).pieces, window)
            self._windowed[window] = made.to(self.input_ids.device)
        return self._windowed[window]

    @cached_property
    def lines(self) -> Lines:
        """The micro-batch with one rollout a line, for models that cannot compute packed rows."""
        return lines_of(self.segments).to(self.input_ids.device)

    @cached_property
    def varlen(self) -> Varlen:
        """For one call of a fused kernel."""
        return (self.seen or self.segments).varlen().to(self.input_ids.device)

    def prepare(self, lm: PreTrainedModel) -> None:
        """Choose how a model's attention is computed, before any of its layers runs."""
        device = self.input_ids.device
        dtype = fused_dtype(lm, device)
        if dtype is not None:
            self.fuse(dtype, fused_heads(lm, device, dtype))

    def fuse(self, dtype: torch.dtype, heads: frozenset[tuple[int, bool]]) -> None:
        """Let the fused kernel compute layers with these ``heads`` (:class:`Fused`)."""
        self.fused = Fused(dtype, heads, self.varlen, fused_kernel()) if heads else None


def build_layout(micro_batch: TensorDict) -> PackLayout:
    """Lay out a micro-batch (see :mod:`lightning_rl.data.batch`) for :func:`packed_attention`.

    The layout is computed on the CPU, even if a strategy makes another device the default.
    """
    device = micro_batch["tokens", "input_ids"].device
    host = host_of(micro_batch)
    rollouts = host["rollouts"]
    length, prompt_length = rollouts["length"], rollouts["prompt_length"]
    start = length.cumsum(0) - length
    prefixes, prefix = rollouts["prefix"].unique(return_inverse=True)
    owner = torch.empty_like(prefixes)
    owner[prefix] = torch.arange(len(length), device="cpu")  # any row with that prompt will do

    # Segments of the forward row: the distinct prompts, then the completions less their last token.
    segment_length = torch.cat([prompt_length[owner], length - prompt_length - 1])
    segment_start = segment_length.cumsum(0) - segment_length
    prefix_start, suffix_start = segment_start.split([len(prefixes), len(length)])
    prefix_start = prefix_start[prefix]
    first_token = torch.cat([start[owner], start + prompt_length])
    first_position = torch.cat([torch.zeros_like(owner), prompt_length])
    tokens = ranges(first_token, segment_length)
    positions = ranges(first_position, segment_length)

    live = host["tokens", "loss_mask"].nonzero().squeeze(1)
    row = token_rows(host)[live]
    offset = live - start[row] - 1  # of the predicting token within its rollout
    in_prompt = offset < prompt_length[row]
    predictors = torch.where(
        in_prompt, prefix_start[row] + offset, suffix_start[row] + offset - prompt_length[row]
    )
    # The host continues at once: the copied data does not change any more.
    tokens, positions, live, row, predictors = (
        x.to(device, non_blocking=True) for x in (tokens, positions, live, row, predictors)
    )
    return PackLayout(
        input_ids=micro_batch["tokens", "input_ids"][tokens],
        position_ids=positions,
        tokens=tokens,
        live=live,
        rows=row,
        predictors=predictors,
        segments=Segments(segment_start, segment_length, prefix),
        longest=max(torch.cat([prompt_length, length - 1]).tolist(), default=0),
    )


def of_all_tokens(micro_batch: TensorDict, values: Tensor) -> Tensor:
    """Spread ``values`` (S, ...) of the forward pass's tokens over the micro-batch's T tokens.

    Rollouts that share a prompt share its values; the last token of each, which is in no forward
    pass, gets -1.
    """
    layout, rollouts = build_layout(micro_batch), host_of(micro_batch)["rollouts"]
    spread = values.new_full((micro_batch["tokens"].batch_size[0], *values.shape[1:]), -1)
    spread[layout.tokens] = values
    length, prompt_length = rollouts["length"], rollouts["prompt_length"]
    start = length.cumsum(0) - length
    prefixes, prefix = rollouts["prefix"].unique(return_inverse=True)
    owner = torch.empty_like(prefixes)
    owner[prefix] = torch.arange(len(length), device="cpu")  # as in the layout
    sources, targets = (
        ranges(begin, prompt_length).to(values.device) for begin in (start[owner[prefix]], start)
    )
    spread[targets] = spread[sources]
    return spread


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unsupported: object,
) -> tuple[Tensor, None]:
    """Compute one layer's attention over a micro-batch.

    q is (1, H, S, D), k (1, Hkv, S, D) and v (1, Hkv, S, E); the result is (1, S, H, E).

    Raises:
        ConfigError: if the model's attention has a feature that this function would ignore.
    """
    _refuse(module, unsupported)
    scores = OpenScores.of(softcap, s_aux)
    if s_aux is not None and layout.exchange is not None:
        raise ConfigError(
            f"{type(module).__name__} has attention sinks, one for each head, which sequence "
            "parallelism does not support yet; set sequence: 1"
        )
    windowed = sliding_window is not None and layout.longest > sliding_window
    window = sliding_window if windowed else None
    # Token-major rows make every gather below a copy of whole rows.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if layout.exchange is not None:
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = layout.exchange.gather_tokens(*_of_one_width(q, k, v))
    fused = layout.fused if scores is None else None
    if fused is not None and not dropout and (q.shape[-1], windowed) in fused.heads:
        q, k, v = (x.to(fused.dtype) for x in (q, k, v))
        output = attend(q, k, v, fused.layout, scaling, fused.kernel, window)
    else:
        output = _batched(q, k, v, layout, scaling, dropout, window, scores)
    if layout.exchange is not None:
        output = layout.exchange.gather_heads(output)[..., : value.shape[-1]]
    return output[None], None


@torch.compiler.disable  # the number of batches changes with every micro-batch
def _batched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackLayout,
    scaling: float | None,
    dropout: float,
    window: int | None,
    scores: OpenScores | None,
) -> Tensor:
    """Compute attention (Q, H, D) of q (Q, H, D) on k and v (K, Hkv, D), by SDPA over batches."""
    batches = layout.batches_within(window)
    repeats = q.shape[1] // k.shape[1]
    outputs = []
    for batch in batches.parts:
        mask = batch.mask_for(q)
        if scores is not None:
            parts = _gather(q, batch.query), _gather(k, batch.key), _gather(v, batch.key)
            out = scores.attend(*parts, mask, scaling, dropout)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            continue
        if not dropout and is_short(batch, q, repeats):
            outputs.append(attend_short(batch, q, k, v, scaling))
            continue
        out = F.scaled_dot_product_attention(
            _gather(q, batch.query),
            _gather(k, batch.key).repeat_interleave(repeats, 1),
            _gather(v, batch.key).repeat_interleave(repeats, 1),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[batches.restore]


def _of_one_width(*rows: Tensor) -> Sequence[Tensor]:
    """Pad rows to one width, to send them in one message; zeros do not change attention."""
    widest = max(x.shape[-1] for x in rows)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in rows]


AttentionInterface.register(ATTENTION, packed_attention)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return rows of x (S, H, D) at index (N, L), as (N, H, L, D)."""
    rows = F.embedding(index, x.flatten(1))  # its backward is much faster than indexing's
    return rows.unflatten(-1, x.shape[1:]).transpose(1, 2)


def _refuse(module: nn.Module, features: dict[str, object]) -> None:
    if features.get("position_bias") is not None:
        raise ConfigError(
            f"{type(module).__name__} uses position_bias, which packed attention does not compute; "
            "use a model without it"
        )
