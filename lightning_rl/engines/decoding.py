"""Decoding: rows of tokens that a Hugging Face model writes side by side, one token a step."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lightning_rl.engines.columns import as_argument, attends, begun_cache, empty_cache
from lightning_rl.engines.drawing import draw
from lightning_rl.engines.kept_texts import KeptText, KeptTexts
from lightning_rl.engines.requests import DecodeRequest
from lightning_rl.models.row_attention import ROWS
from lightning_rl.vision.decoding import SeenOnce, seeing_inputs
from lightning_rl.vision.reader import attention

PREFILL_TOKENS = 16384
"""Most tokens, with padding, of prompts that are read in one pass; it bounds memory."""
KEPT_DEAD = 0.25
"""Share of rows that may be over and still computed: taking them out copies the others' cache."""


class Decoder:
    """Writes rows until they are over; others may join at any step.

    Equal prompts of a writer that join together are read once. If weights change in between, call
    :meth:`reread`: what the old ones left in the cache is then computed anew, so that every token
    is exactly its version's.

    Args:
        lm: the model; its weights may change between two calls.
        ends: tokens that end a row.
        kept: of rows that are over, for those that continue them; None: nothing.
        tower: sees pictures; None: the model reads none.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        ends: Sequence[int],
        kept: KeptTexts | None = None,
        tower: SeenOnce | None = None,
    ) -> None:
        self.lm = lm
        self.kept = kept
        self.tower = tower
        # Else it computes what SDPA cannot, or attends in a way of its own.
        if lm.config._attn_implementation == "sdpa" and lm._can_set_attn_implementation():
            lm.set_attn_implementation(attention(lm.config, ROWS))
        self.ends = list(ends)
        self.rows: list[DecodeRequest] = []
        self._cache: Cache = empty_cache(lm.config)
        self._width = 0  # columns that have been read, of states too
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
        alike: dict[tuple[Any, ...], list[DecodeRequest]] = defaultdict(list)
        for row in rows:
            row.cached = row.writer.version
            alike[row.writer, row.pictures, *row.text].append(row)
        begun = [self._begun(rows[0]) for rows in alike.values()]
        for known in (False, True):  # what has no kept beginning, and what has
            chosen = [
                (rows, kept)
                for rows, kept in zip(alike.values(), begun, strict=True)
                if (kept is not None) == known
            ]
            ordered = sorted(chosen, key=lambda one: len(one[0][0].text))
            while ordered:
                count = len(ordered)
                while count > 1 and count * len(ordered[count - 1][0][0].text) > PREFILL_TOKENS:
                    count -= 1
                self._read(ordered[:count])
                del ordered[:count]

    def _begun(self, row: DecodeRequest) -> KeptText | None:
        return None if self.kept is None else self.kept.longest(row.writer, row.text, row.pictures)

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
        if self.kept is not None:
            self._keep_texts(self.kept, over)
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

    def compute(self, rows: Sequence[DecodeRequest], cache: Cache, **inputs: Any) -> Tensor:
        """Logits (N, 1, V) of what follows a batch in which each of ``rows`` has a line.

        The keys and values of its tokens are added to the cache. ``position_ids`` (N, T) among the
        inputs are the tokens' indices in the rows' texts.
        """
        if any(row.pictures for row in rows):
            assert self.tower is not None
            body = self.tower.family.language_model(self.lm)
            inputs = seeing_inputs(self.tower, self.lm, [row.seen for row in rows], **inputs)
            output = body(**inputs, **as_argument(cache, body), use_cache=True)
            return self.lm.get_output_embeddings()(output.last_hidden_state[:, -1:])
        inputs |= as_argument(cache, self.lm)
        return self.lm(**inputs, use_cache=True, logits_to_keep=1).logits

    def _read(self, chosen: Sequence[tuple[list[DecodeRequest], KeptText | None]]) -> None:
        """Read texts that one row or several have, each from where what is kept of it ends.

        All read as many tokens as the one that has most to read: so their columns have no holes.
        """
        alike = [rows for rows, _ in chosen]
        firsts = [rows[0] for rows in alike]
        texts, device = [row.text for row in firsts], self.lm.device
        width = max(map(len, texts))
        known = [0 if kept is None else len(kept.token_ids) for _, kept in chosen]
        new = max(len(text) - length for text, length in zip(texts, known, strict=True))
        ids = torch.tensor([([self.ends[0]] * (width - len(text)) + text)[-new:] for text in texts])
        starts = torch.tensor([width - len(text) for text in texts])
        columns = torch.arange(width)
        mask = (columns >= starts[:, None]) if starts.any() or new < width else None
        begun = [kept for _, kept in chosen]
        cache = begun_cache(begun, starts, width - new, self.lm.config)
        logits = self.compute(
            firsts,
            cache,
            input_ids=ids.to(device),
            attention_mask=None if mask is None else mask.long().to(device),
            position_ids=(columns[-new:] - starts[:, None]).clamp(min=0).to(device),
        )
        copies = [place for place, rows in enumerate(alike) for _ in rows]
        which = torch.tensor(copies, device=device)
        if not self.rows:
            if len(copies) > len(alike):
                for layer in cache.layers:
                    layer.keep(which, 0)
            self._cache, self._width = cache, width
            self._starts, self._logits = starts[copies], logits[which, -1]
        else:
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.join(theirs, which)
            old, self._width = self._width, max(self._width, width)
            later = self._starts + self._width - old, starts[copies] + self._width - width
            self._starts = torch.cat(later)
            self._logits = torch.cat([self._logits, logits[which, -1]])
        self.rows += [row for rows in alike for row in rows]

    def _keep_texts(self, kept: KeptTexts, over: Sequence[DecodeRequest]) -> None:
        """Keep what the cache has of rows that are over: all of them but their last tokens."""
        width, layers = self._width, self._cache.layers
        for place, row in enumerate(self.rows):
            if row in over:
                part = slice(int(self._starts[place]), width)
                parts = [
                    (layer.keys[place, :, part].clone(), layer.values[place, :, part].clone())
                    for layer in layers
                ]
                kept.keep(row.writer, row.text[:-1], parts, row.pictures)

    def _write(self) -> None:
        """Give the model each row's last token; of a row that is over, it does not matter which."""
        width, device = self._width, self.lm.device
        mask = None
        if self._starts.any() and attends(self._cache):  # states do not know of columns before
            mask = (torch.arange(width + 1) >= self._starts[:, None]).long().to(device)
        logits = self.compute(
            self.rows,
            self._cache,
            input_ids=torch.tensor([[row.tokens[-1]] for row in self.rows], device=device),
            attention_mask=mask,
            position_ids=(width - self._starts)[:, None].to(device),
        )
        self._width += 1
        self._logits = logits[:, -1]

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
            self._cache, self._width = empty_cache(self.lm.config), 0
            return
        first = int(self._starts.min())
        self._starts, self._width = self._starts - first, self._width - first
        kept = torch.tensor(places, device=self.lm.device)
        for layer in self._cache.layers:
            layer.keep(kept, first)
