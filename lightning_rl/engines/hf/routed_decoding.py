"""Decoding that records which experts of a mixture each token was routed to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lightning_rl.engines.hf.adapted_decoding import AdaptedDecoder, Adapters
from lightning_rl.engines.hf.requests import DecodeRequest
from lightning_rl.engines.kept_texts import KeptText
from lightning_rl.models.routing import Routing


class RoutedDecoder(AdaptedDecoder):
    """Records the experts of each token with its request.

    Tokens that are recomputed after a change of weights keep the experts of the first time, with
    which their logprobs were computed.
    """

    def __init__(
        self, lm: PreTrainedModel, ends: Sequence[int], adapters: Adapters, routing: Routing
    ) -> None:
        super().__init__(lm, ends, None, adapters)  # of kept texts the experts are not known
        self._routing = routing

    def compute(self, rows: Sequence[DecodeRequest], cache: Cache, **inputs: Any) -> Tensor:
        self._routing.begin()
        logits = super().compute(rows, cache, **inputs)
        lines, columns = inputs["input_ids"].shape
        experts = self._routing.chosen().cpu().unflatten(0, (lines, columns))
        for row, line in zip(rows, experts, strict=True):
            if row.reason is None:
                # The last column is the text's last token so far.
                _extend(row, line, len(row.prompt) + len(row.tokens))
        return logits

    def _read(self, chosen: Sequence[tuple[list[DecodeRequest], KeptText | None]]) -> None:
        super()._read(chosen)
        for (first, *others), _ in chosen:  # of equal texts one was read
            for other in others:
                _extend(other, torch.cat(first.routed), len(first.prompt) + len(first.tokens))


def _extend(row: DecodeRequest, experts: Tensor, end: int) -> None:
    """Add the new part of experts (C, L, K), which end at token ``end``."""
    known = sum(map(len, row.routed))
    if known < end:
        row.routed.append(experts[len(experts) - (end - known) :])
