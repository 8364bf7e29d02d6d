"""A policy for the rest of the world: the directory that transformers, peft and vLLM load."""

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.models.generation_config import repaired
from lightning_rl.models.lora import ADAPTER, LoRA
from lightning_rl.models.pretrained import Loading, load_config
from lightning_rl.models.sharding import full_tensor
from lightning_rl.models.soundness import held_dtypes
from lightning_rl.models.tokenizer import save_tokenizer
from lightning_rl.run.checkpoint_io import in_host_memory
from lightning_rl.run.dist import rank

_METADATA = {"format": "pt"}


class Exported(Protocol):
    """What is asked of a policy."""

    model: str
    lm: PreTrainedModel
    lora: LoRA | None
    stored: "StoredDtypes"
    tokenizer: PreTrainedTokenizerBase
    loading: Loading

    @property
    def sharded(self) -> bool: ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Under their Hugging Face names, a LoRA merged; with all ranks."""


@dataclass(frozen=True)
class StoredDtypes:
    """What a model's files hold its weights in, which training keeps in float32.

    Args:
        usual: of most weights; None: it is not known.
        others: of weights that differ from it, by their names in the files.
    """

    usual: torch.dtype | None
    others: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, model: str, loading: Loading, weights: bool = True) -> "StoredDtypes":
        """Read what ``config.json`` says, and with ``weights`` their files' headers."""
        config = load_config(model, loading)
        usual = config.dtype or config.get_text_config().dtype
        folder = Path(model, loading.model_kwargs.get("subfolder", ""))
        held = held_dtypes(folder) if weights else {}
        if usual is None and held:
            usual = Counter(held.values()).most_common(1)[0][0]
        return cls(usual, {name: dtype for name, dtype in held.items() if dtype != usual})

    def cast(self, name: str, weight: Tensor) -> Tensor:
        """The weight on the host, with as many bits as in the files if it has more."""
        dtype = self.others.get(name, self.usual)
        if dtype is None or not weight.is_floating_point() or weight.itemsize <= dtype.itemsize:
            return weight.cpu()
        return weight.to("cpu", dtype)


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
        weights = self._gathered()
        self._weights = in_host_memory(weights) if copied else weights

    def write(self, directory: str | Path) -> None:
        """Write weights, configuration, tokenizer and code of the model's own."""
        policy, place = self._policy, Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        if self._alone:
            self._write_adapters(place)
        else:
            self._write_model(place)
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
                gathered[name] = whole.cpu() if self._alone else policy.stored.cast(name, whole)
        return gathered

    def _write_model(self, place: Path) -> None:
        policy, lm = self._policy, self._policy.lm
        if lm.can_generate():  # not copied, so that its faults are told of once
            lm.generation_config = repaired(lm.generation_config, policy.model)
        if policy.sharded or policy.lora is not None:
            if lm.can_generate():
                lm.generation_config.save_pretrained(place)
            weights = {name: _apart(weight) for name, weight in self._weights.items()}
            save_torch_state_dict(weights, place, metadata=_METADATA)
        else:
            lm.save_pretrained(place, state_dict=self._weights)
        config = deepcopy(lm.config)
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if part is not None:
                part.dtype = next(iter(self._weights.values())).dtype
        config.save_pretrained(place)

    def _write_adapters(self, place: Path) -> None:
        from peft import get_peft_model_state_dict

        lm: Any = self._policy.lm
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
