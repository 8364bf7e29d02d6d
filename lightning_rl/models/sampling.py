"""The distribution that a token was sampled from, so that it is scored under the same one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

CUT = -1e9
"""The logit of what could not be sampled: finite, because 0 x inf is nan in an entropy."""


def end_tokens(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> list[int]:
    """What engines end a completion with: the tokenizer's end token, and those of the model."""
    more = GenerationConfig.from_model_config(config).eos_token_id
    ends = more if isinstance(more, list) else [more]
    return sorted({tokenizer.eos_token_id, *(end for end in ends if end is not None)})


def sampling_columns(
    targets: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    no_end: Tensor | None,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """For ``sampled_logits``: columns (M, 1) to (M, 4) that say how, and end tokens (E,).

    First the temperature; then top-k and top-p, unless they cut nothing; last, unless E is 0,
    whether end tokens were left out.
    """
    # Sampled at temperature τ, so score at τ too, else ratios start away from 1.
    columns = [torch.where(temperature > 0, temperature, 1.0)]
    if top_k is not None and top_p is not None and bool(((top_k > 0) | (top_p < 1)).any()):
        columns += [top_k.float(), top_p.float()]
    end_ids = torch.tensor([] if no_end is None else ends, dtype=torch.long).to(targets.device)
    if no_end is not None and end_ids.numel():
        # One that is there all the same, in a rollout from elsewhere, shows that none was left out.
        columns.append((no_end & ~torch.isin(targets, end_ids)).float())
    return torch.stack(columns, 1), end_ids


def sampled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    sampling: Tensor,
    ends: Tensor,
) -> Tensor:
    """Logits (m, V), float32, of the distribution that was sampled from.

    In the order of the engines: end tokens where none could be, temperature, top-k, top-p.
    """
    logits = nn.functional.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    scaled = logits.float().div_(sampling[:, :1])
    if ends.numel():
        scaled[:, ends] = scaled[:, ends].masked_fill(sampling[:, -1:] > 0, CUT)
        sampling = sampling[:, :-1]
    if sampling.shape[1] == 1:
        return scaled
    cut = _cut(scaled, sampling[:, 1:2], sampling[:, 2:3])
    # Rounding may put a sampled token just outside of the trainer's own nucleus: keep it, since it
    # was sampled.
    cut.scatter_(-1, targets[:, None], False)
    return scaled.masked_fill_(cut, CUT)


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Where (m, V) top-k, then top-p among what is left, exclude a token; both given as (m, 1)."""
    ordered, order = scaled.sort(-1)
    vocabulary = scaled.shape[1]
    # Engines keep what ties with the k-th, which in bfloat16 is common.
    kth = ordered.gather(-1, (vocabulary - top_k.long()).clamp(0, vocabulary - 1))
    outside = (ordered < kth) & (top_k > 0)
    probs = ordered.masked_fill(outside, -torch.inf).softmax(-1)
    # Summed from the unlikeliest up, as vLLM does: so both round alike at the nucleus' boundary.
    outside |= probs.cumsum(-1) <= 1 - top_p
    outside[:, -1] = False  # the likeliest stays, however small top_p is
    return torch.zeros_like(outside).scatter_(-1, order, outside)
