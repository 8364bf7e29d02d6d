"""Provide engines that draw tokens by lot, so that rounding decides none of them.

Two layouts of one computation (two processes and one, other micro-batches, sharded weights) add in
other orders. Logprobs then differ by rounding, and a number drawn between the two gives another
token, after which nothing can be compared: by chance, and by the CPU. Here a token depends on the
request's own generator alone. Its logprob is the model's, so that weights that do not reach an
engine, or a gradient that is not averaged, still show in all that is computed from it.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.engines.hf.adapters import TransformersAdapters
from lightning_rl.engines.hf.decoding import Decoder
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.hf.requests import DecodeRequest

END, DIGITS = 1, range(3, 13)  # of the tiny model's tokenizer
END_SHARE = 0.1


def draw_by_lot(logits: Tensor, rows: Sequence[DecodeRequest]) -> tuple[list[int], list[float]]:
    """Draw a digit or the end for each of N rows, with its logprob by logits (N, V)."""
    tokens = [_lot(row) for row in rows]
    for row in rows:
        sampling = row.sampling
        penalized = sampling.distribution.penalizes
        if penalized or sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            raise NotImplementedError(f"lots know of temperatures alone, not of {sampling}")
    # Logits as they are at temperature 0, where an engine takes the likeliest.
    temperatures = logits.new_tensor([row.sampling.temperature or 1.0 for row in rows])
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    return tokens, logprobs[range(len(rows)), tokens].tolist()


def _lot(row: DecodeRequest) -> int:
    if row.random.random() < END_SHARE and len(row.tokens) >= row.sampling.min_tokens:
        return END
    return row.random.choice(DIGITS)


class LotEngine(TransformersEngine):
    """The tokens are the same whatever the weights are."""

    def _decoder(self, lm: PreTrainedModel) -> Decoder:
        decoder = super()._decoder(lm)
        decoder.draw = draw_by_lot  # type: ignore[method-assign]
        return decoder


class LotAdapters(LotEngine, TransformersAdapters):
    """The same for several policies on one base."""
