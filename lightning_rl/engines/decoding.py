"""Decoding: rows of tokens that a Hugging Face model writes side by side, one token a step."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling

ATTENTION = "lightning_rl_decode"
PREFILL_TOKENS = 16384
"""Most tokens, with padding, of prompts that are read in one pass; it bounds memory."""
KEPT_DEAD = 0.25
"""Share of rows that may be over and still computed: taking them out copies the others' cache."""
LEAST_ROOM = 32
"""Columns that a cache gets beyond those it needs: each time it runs out of them, all is copied."""


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

    @property
    def text(self) -> list[int]:
        """All of its tokens."""
        return [*self.prompt, *self.tokens]

    def completion(self) -> Completion:
        """What an engine answers."""
        return Completion(self.tokens, self.logprobs, str(self.reason), self.versions)


class _Columns(DynamicLayer):
    """One layer's keys and values (N, H, T, D) of N rows whose last token is the last column.

    Rows that are shorter begin in later columns. They lie in memory column by column, (T, N, H, D),
    with room behind them that nothing touches yet: a column that is added is written in one piece,
    where to concatenate would copy all, every time.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._hold([_by_column(part) for part in (keys, values)], keys.shape[-2])

    def _hold(self, parts: list[Tensor], width: int) -> None:
        """Keep keys and values by column, of which so many are in use."""
        self._parts = parts
        self.keys, self.values = (part[:width].permute(1, 2, 0, 3) for part in parts)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        width = self.get_seq_length()
        more = width + key_states.shape[-2]
        parts = self._parts
        if more > len(parts[0]):
            parts = [_with_room(part[:width], more + max(width, LEAST_ROOM)) for part in parts]
        for part, new in zip(parts, (key_states, value_states), strict=True):
            part[width:more] = _by_column(new)
        self._hold(parts, more)
        return self.keys, self.values

    def keep(self, rows: Tensor, first: int) -> None:
        """Only these rows (n,), from this column on."""
        width = self.get_seq_length()
        self._hold([part[first:width, rows] for part in self._parts], width - first)

    def join(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Add, as rows, of other keys and values those of ``rows`` (n,)."""
        old, new = self.get_seq_length(), keys.shape[-2]
        width = max(old, new)
        parts = [
            torch.cat([_aligned(mine[:old], width), _aligned(_by_column(theirs[rows]), width)], 1)
            for mine, theirs in zip(self._parts, (keys, values), strict=True)
        ]
        self._hold(parts, width)


def _by_column(part: Tensor) -> Tensor:
    """(N, H, T, D) as (T, N, H, D)."""
    return part.permute(2, 0, 1, 3)


def _aligned(part: Tensor, width: int) -> Tensor:
    """Columns (T, N, H, D) as the last of so many; those before them are empty."""
    return F.pad(part, (0, 0, 0, 0, 0, 0, width - len(part), 0))


def _with_room(part: Tensor, columns: int) -> Tensor:
    """A copy with so many columns in all; those behind its own hold anything."""
    wider = part.new_empty(columns, *part.shape[1:])
    wider[: len(part)] = part
    return wider


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row, query (N, H, 1, D); of more, transformers' SDPA.

    The query heads that share keys become queries of one head, so keys need no copies: on a CPU
    that takes a quarter of the time or less, where rows are padded.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or key.device.type != "cpu" or features.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **features
        )
    together = query.unflatten(1, (kv_heads, heads // kv_heads)).squeeze(3)
    scores = together @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    out = scores.softmax(-1) @ value
    return out.flatten(1, 2)[:, None], None


AttentionInterface.register(ATTENTION, decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Decoder:
    """Writes rows until they are over; others may join at any step.

    Equal prompts of a writer that join together are read once. If weights change in between, call
    :meth:`reread`: what the old ones left in the cache is then computed anew, so that every token
    is exactly its version's.

    Args:
        lm: the model; its weights may change between two calls.
        ends: tokens that end a row.
    """

    def __init__(self, lm: PreTrainedModel, ends: Sequence[int]) -> None:
        self.lm = lm
        if lm.config._attn_implementation == "sdpa":  # else it computes what SDPA cannot
            lm.set_attn_implementation(ATTENTION)
        self.ends = list(ends)
        self.rows: list[DecodeRequest] = []
        self._cache = DynamicCache()
        self._starts = torch.empty(0, dtype=torch.long)  # the first column of each row
        self._logits = torch.empty(0, device=lm.device)  # (N, V), of each row's next token

    @property
    def live(self) -> list[DecodeRequest]:
        """Rows that are not over."""
        return [row for row in self.rows if row.reason is None]

    @torch.inference_mode()
    def join(self, rows: Sequence[DecodeRequest]) -> None:
        """Read the rows' tokens; from the next step on they are written too."""
        self._drop_dead(at_most=0.0)
        alike: dict[tuple[Engine, *tuple[int, ...]], list[DecodeRequest]] = defaultdict(list)
        for row in rows:
            row.cached = row.writer.version
            alike[row.writer, *row.text].append(row)
        ordered = sorted(alike.values(), key=lambda rows: len(rows[0].text))
        while ordered:
            count = len(ordered)
            while count > 1 and count * len(ordered[count - 1][0].text) > PREFILL_TOKENS:
                count -= 1
            self._read(ordered[:count])
            del ordered[:count]

    def reread(self) -> None:
        """Compute the cache anew of live rows whose writer's weights have changed."""
        changed = [row for row in self.live if row.cached != row.writer.version]
        if changed:
            self._keep([p for p, row in enumerate(self.rows) if row not in changed])
            self.join(changed)

    @torch.inference_mode()
    def step(self) -> list[DecodeRequest]:
        """Draw a token for each live row; returns those that are over now."""
        places = [place for place, row in enumerate(self.rows) if row.reason is None]
        live = [self.rows[place] for place in places]
        logits = self._logits if len(live) == len(self.rows) else self._logits[places]
        drawn, logprobs = self.draw(logits.float(), live)
        over = []
        for row, token, logprob in zip(live, drawn, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(row.writer.version)
            if token in self.ends:
                row.reason = "stop"
            elif len(row.tokens) == row.sampling.max_tokens:
                row.reason = "length"
            if row.reason is not None:
                over.append(row)
        if len(over) < len(live):
            self._drop_dead(KEPT_DEAD)
            self._write()
        else:
            self._drop_dead(at_most=0.0)
        return over

    def draw(self, logits: Tensor, rows: Sequence[DecodeRequest]) -> tuple[list[int], list[float]]:
        """A token for each of N rows by logits (N, V), and its logprob."""
        return draw(logits, rows, self.ends)

    # ---------------------------------------------------------------- the model

    def compute(self, rows: Sequence[DecodeRequest], **inputs: Any) -> Any:
        """The model's output for a batch in which each of ``rows`` has a line."""
        return self.lm(**inputs, use_cache=True, logits_to_keep=1)

    def _read(self, alike: Sequence[list[DecodeRequest]]) -> None:
        """Read texts that one row or several have."""
        firsts = [rows[0] for rows in alike]
        texts, device = [row.text for row in firsts], self.lm.device
        width = max(map(len, texts))
        ids = torch.tensor([[self.ends[0]] * (width - len(text)) + text for text in texts])
        starts = torch.tensor([width - len(text) for text in texts])
        columns = torch.arange(width)
        mask = (columns >= starts[:, None]) if starts.any() else None
        output = self.compute(
            firsts,
            input_ids=ids.to(device),
            attention_mask=None if mask is None else mask.long().to(device),
            position_ids=(columns - starts[:, None]).clamp(min=0).to(device),
            past_key_values=DynamicCache(),
        )
        copies = [place for place, rows in enumerate(alike) for _ in rows]
        which = torch.tensor(copies, device=device)
        layers = output.past_key_values.layers
        if not self.rows:
            self._cache.layers = [
                _Columns(layer.keys[which], layer.values[which]) for layer in layers
            ]
            self._starts, self._logits = starts[copies], output.logits[which, -1]
        else:
            old = self._cache.get_seq_length()
            for mine, new in zip(self._cache.layers, layers, strict=True):
                mine.join(new.keys, new.values, which)
            final = max(old, width)
            self._starts = torch.cat([self._starts + final - old, starts[copies] + final - width])
            self._logits = torch.cat([self._logits, output.logits[which, -1]])
        self.rows += [row for rows in alike for row in rows]

    def _write(self) -> None:
        """Give the model each row's last token; of a row that is over, it does not matter which."""
        width, device = self._cache.get_seq_length(), self.lm.device
        mask = None
        if self._starts.any():
            mask = (torch.arange(width + 1) >= self._starts[:, None]).long().to(device)
        output = self.compute(
            self.rows,
            input_ids=torch.tensor([[row.tokens[-1]] for row in self.rows], device=device),
            attention_mask=mask,
            position_ids=(width - self._starts)[:, None].to(device),
            past_key_values=self._cache,
        )
        self._logits = output.logits[:, -1]

    def _drop_dead(self, at_most: float) -> None:
        """Take rows out that are over, once they are more than this share of all."""
        places = [place for place, row in enumerate(self.rows) if row.reason is None]
        if len(self.rows) - len(places) > at_most * len(self.rows):
            self._keep(places)

    def _keep(self, places: Sequence[int]) -> None:
        """Only the rows in these places, ascending."""
        self.rows = [self.rows[place] for place in places]
        self._starts, self._logits = self._starts[places], self._logits[places]
        if not places:
            self._cache = DynamicCache()
            return
        first = int(self._starts.min())
        self._starts = self._starts - first
        kept = torch.tensor(places, device=self.lm.device)
        for layer in self._cache.layers:
            layer.keep(kept, first)


# ---------------------------------------------------------------- sampling


def draw(
    logits: Tensor, rows: Sequence[DecodeRequest], ends: list[int]
) -> tuple[list[int], list[float]]:
    """A token for each row, and its logprob under the distribution it was drawn from.

    ``logits`` (N, V) in float32. A token is where the cumulative distribution passes a number that
    the row's own generator gives: so it depends on nothing of the other rows.
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
    """Of rows that sample alike: tokens (n,) and logprobs (n,)."""
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
    """Logits with the end held back and tokens penalized, where rows say so."""
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
    """Logits (V,) with those changed that stand in the prompt or were written, as vLLM does."""
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
    """Logits (n, V) with all but min-p's, the top-k and the top-p nucleus removed."""
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
