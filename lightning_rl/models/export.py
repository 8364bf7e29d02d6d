"""A policy for the rest of the world: the directory that transformers, peft and vLLM load."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.models.lora import ADAPTER, LoRA
from lightning_rl.models.pretrained import Loading
from lightning_rl.models.sharding import full_tensor
from lightning_rl.models.tokenizer import save_tokenizer
from lightning_rl.run.checkpoint_io import in_host_memory
from lightning_rl.run.dist import rank

_METADATA = {"format": "pt"}


class Exported(Protocol):
    """What is asked of a policy."""

    model: str
    lm: PreTrainedModel
    lora: LoRA | None
    tokenizer: PreTrainedTokenizerBase
    loading: Loading

    @property
    def sharded(self) -> bool: ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Under their Hugging Face names, a LoRA merged; with all ranks."""


class ModelExport:
    """A policy's weights as they are now, to be written when there is time.

    Make it on all ranks, since sharded weights are gathered by all; write it on rank 0.

    Args:
        policy: what is exported. Later changes of its weights do not matter if they are copied.
        merge_adapters: write one full model, in which a LoRA is merged. False: of a LoRA its
            adapters alone, in peft's format.
        copied: keep the weights in host memory of their own, so that training may go on.

    Raises:
        ConfigError: for a LoRA that cannot be written without its base.
    """

    def __init__(self, policy: Exported, merge_adapters: bool = True, copied: bool = False) -> None:
        self._policy = policy
        self._alone = policy.lora is not None and not merge_adapters
        self._weights: dict[str, Tensor] | None = None  # None: read from the model when written
        if self._alone or policy.sharded or policy.lora is not None or copied:
            weights = self._gathered()
            self._weights = in_host_memory(weights) if copied else weights

    def write(self, directory: str | Path) -> None:
        """Write weights, configuration, tokenizer and code of the model's own."""
        policy, place = self._policy, Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        if self._alone:
            self._write_adapters(place)
        elif policy.sharded or policy.lora is not None:
            self._write_merged(place)
        else:
            policy.lm.save_pretrained(place, state_dict=self._weights)
        save_tokenizer(policy.tokenizer, place)
        policy.loading.copy_code(policy.model, place)

    def _gathered(self) -> dict[str, Tensor]:
        """The weights on the host, on rank 0; on others none."""
        policy = self._policy
        if self._alone:
            assert policy.lora is not None
            policy.lora.require_adapters_hold_all()
            named = ((name, w) for name, w in policy.lm.state_dict().items() if ".lora_" in name)
        else:
            tied = policy.lm.config.get_text_config().tie_word_embeddings
            left_out = "lm_head.weight" if tied else None
            named = ((name, w) for name, w in policy.named_weights() if name != left_out)
        gathered: dict[str, Tensor] = {}
        for name, weight in named:
            whole = full_tensor(weight.detach())  # with all ranks
            if rank() == 0:
                gathered[name] = whole.cpu()
        return gathered

    def _write_merged(self, place: Path) -> None:
        assert self._weights is not None
        weights = {name: _apart(weight) for name, weight in self._weights.items()}
        config = deepcopy(self._policy.lm.config)
        config.dtype = next(iter(weights.values())).dtype
        config.save_pretrained(place)
        if self._policy.lm.can_generate():
            self._policy.lm.generation_config.save_pretrained(place)
        save_torch_state_dict(weights, place, metadata=_METADATA)

    def _write_adapters(self, place: Path) -> None:
        from peft import get_peft_model_state_dict

        lm: Any = self._policy.lm
        assert self._weights is not None
        adapters = get_peft_model_state_dict(
            lm, state_dict=self._weights, adapter_name=ADAPTER, save_embedding_layers=False
        )
        named = {f"base_model.model.{name}": w.contiguous() for name, w in adapters.items()}
        save_file(named, place / "adapter_model.safetensors", metadata=_METADATA)
        lm.peft_config[ADAPTER].save_pretrained(place)


def _apart(weight: Tensor) -> Tensor:
    """The weight in memory that is only its own: an expert's may be part of a stack."""
    whole = weight.untyped_storage().nbytes() == weight.nbytes
    return weight.contiguous() if whole else weight.clone(memory_format=torch.contiguous_format)
