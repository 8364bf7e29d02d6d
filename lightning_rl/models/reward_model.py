"""RewardModel: a sequence classifier of one label, which scores a prompt with its completion."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from lightning_rl.data.chats import render
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.errors import ConfigError
from lightning_rl.models.export import StoredDtypes
from lightning_rl.models.lora import LoRA, merged_weights
from lightning_rl.models.model_checks import require_complete, require_finite
from lightning_rl.models.preparation import disable_dropout
from lightning_rl.models.pretrained import Loading, load_config, not_found, positions_of
from lightning_rl.models.sampling import at_least_float32
from lightning_rl.models.stacked import FileNames
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Message

_SCORER = "ForSequenceClassification"
HEAD = "score"
"""Name of the layer that makes a number of the last token's hidden state."""


class RewardModel(nn.Module):
    """A model of ``AutoModelForSequenceClassification`` with one label, as TRL trains them.

    Args:
        model: directory or hub name of a reward model, or if ``new_head`` of any causal LM.
        loading: how its files are read.
        new_head: take only a causal LM's body where the head is missing, with a random head.
        dtype: of its weights.
        lora: train adapters, and the head; None: all weights.

    Raises:
        ConfigError: if the model cannot be loaded, is no reward model, or its weights are NaN; or
            for a LoRA on quantised weights.
    """

    reader = None
    sharded = False

    def __init__(
        self,
        model: str,
        loading: Loading = Loading(),
        new_head: bool = False,
        dtype: torch.dtype = torch.float32,
        lora: LoRA | None = None,
    ) -> None:
        super().__init__()
        self.model, self.loading = model, loading
        self.tokenizer = load_tokenizer(model, loading)
        self.lm = _load(model, loading, new_head, dtype)
        if self.lm.config.pad_token_id is None or new_head:
            self.lm.config.pad_token_id = padding_of(self.tokenizer)
        self.lm.config.architectures = [type(self.lm).__name__]  # its file has the causal LM's
        disable_dropout(self.lm)
        self.stored = StoredDtypes.of(model, loading)
        self.lora = lora and _with_head(lora)
        if self.lora is not None:
            self.lora.attach(self.lm)

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of a text; None: unknown."""
        return positions_of(self.lm.config)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the rewards (N,) of the texts of :func:`padded`."""
        found = self.lm(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        )
        return at_least_float32(found.logits.squeeze(-1))

    def parameter_groups(self, value_lr: float | None) -> list[dict[str, Any]]:
        """Return the trained parameters, in one group."""
        return [{"params": [p for p in self.lm.parameters() if p.requires_grad]}]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, with a LoRA merged."""
        weights = self.lm.state_dict().items() if self.lora is None else merged_weights(self.lm)
        yield from FileNames(self.lm).each(weights)


def _with_head(lora: LoRA) -> LoRA:
    """Return the LoRA with the head, which is new, among the weights that are trained as a whole.

    Raises:
        ConfigError: for quantised weights.
    """
    if lora.quantization is not None:
        raise ConfigError(
            f"lora.quantization={type(lora.quantization).__name__}: a reward model is not "
            "quantised; leave it out"
        )
    saved = lora.options.get("modules_to_save") or []
    return replace(lora, options=lora.options | {"modules_to_save": [*saved, HEAD]})


def _load(model: str, loading: Loading, new_head: bool, dtype: torch.dtype) -> PreTrainedModel:
    config = load_config(model, loading)
    kinds = config.architectures or []
    scores = any(kind.endswith(_SCORER) for kind in kinds)
    if not new_head and not (scores and config.num_labels == 1):
        found = f"{config.num_labels} labels" if scores else f"architectures={kinds}"
        raise ConfigError(
            f"model={model!r} has {found} in its config.json, but a reward model is a "
            f"...{_SCORER} of one label; train one with RewardModelModule"
        )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report on a new head fills a page
    try:
        with torch.device("cpu"):  # transformers needs accelerate to load to another
            lm, info = AutoModelForSequenceClassification.from_pretrained(
                model,
                num_labels=1,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, in our words
                **loading.of_model,
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(not_found(model, "sequence classifier", error)) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if new_head:  # the output layer of a causal LM is left over, and the new head is missing
        head = {name for name in info["missing_keys"] if name.startswith(f"{HEAD}.")}
        info["missing_keys"] = set(info["missing_keys"]) - head
        info["unexpected_keys"] = set(info["unexpected_keys"]) - {"lm_head.weight"}
    require_complete(model, info)
    require_finite(model, lm.named_parameters())
    return cast(PreTrainedModel, lm.to(torch.get_default_device()))


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills up shorter texts, which is none that ends a text.

    transformers reads the score at the last token that is no padding.
    """
    ends = end_tokens_of(tokenizer).token_ids
    known = (tokenizer.pad_token_id, tokenizer.bos_token_id, *range(len(ends) + 1))
    return next(i for i in known if i is not None and i not in ends)


def padded(texts: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
    """Return texts as ``input_ids`` and ``attention_mask`` (N, S), filled up on the right."""
    longest = max(map(len, texts))
    filled = {
        "input_ids": [[*t, *[padding] * (longest - len(t))] for t in texts],
        "attention_mask": [[1] * len(t) + [0] * (longest - len(t)) for t in texts],
    }
    return {name: torch.tensor(rows, device="cpu") for name, rows in filled.items()}


def scored_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    ended: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Return the tokens by which a reward model knows a prompt and its completion, as in TRL.

    A chat is written by the chat template, with the variables ``options``. A text is followed by
    the end token if it ``ended``.

    Raises:
        ConfigError: for a chat, if the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        token_ids: list[int] = tokenizer(f"{prompt}{completion}")["input_ids"]
        end = end_tokens_of(tokenizer)
        return [*token_ids, end.text] if ended and not end.ended(token_ids) else token_ids
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the reward model {tokenizer.name_or_path!r} has no chat template, but the prompts "
            "are chats; use one that was trained on chats"
        )
    said = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else completion
    )
    text = render(tokenizer, [*prompt, *said], options, closed=True)
    chat: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return chat
