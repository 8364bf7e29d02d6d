"""Exports a policy as a directory that transformers, peft and vLLM load."""

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.models.generation_config import repaired
from lightning_rl.models.lora import ADAPTER, LoRA
from lightning_rl.models.model_checks import held
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.pretrained import Loading, base_of, load_config
from lightning_rl.models.tokenizer import save_tokenizer
from lightning_rl.run.host_memory import in_host_memory
from lightning_rl.run.processes.dist import rank

_METADATA = {"format": "pt"}


class Exported(Protocol):
    """The interface of a policy that can be exported."""

    model: str
    lm: PreTrainedModel
    lora: LoRA | None
    stored: "StoredDtypes"
    tokenizer: PreTrainedTokenizerBase
    loading: Loading

    @property
    def sharded(self) -> bool: ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under their Hugging Face names, with a LoRA merged; all ranks call it."""


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes of the weights in a model's files, which training keeps in float32.

    Args:
        usual: dtype of most weights; None: unknown.
        others: dtypes of the other weights, by their names in the files.
    """

    usual: torch.dtype | None
    others: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, model: str, loading: Loading) -> "StoredDtypes":
        """Read ``config.json``, and the headers of the weight files that are used."""
        config = load_config(model, loading)
        usual = config.dtype or config.get_text_config().dtype
        folder = Path(model, loading.model_kwargs.get("subfolder", ""))
        found = () if loading.random_init else held(folder)
        dtypes = {name: dtype for name, _, dtype in found if dtype is not None}
        if usual is None and dtypes:
            usual = Counter(dtypes.values()).most_common(1)[0][0]
        return cls(usual, {name: dtype for name, dtype in dtypes.items() if dtype != usual})

    def cast(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight on the host, in the files' dtype if that has fewer bits."""
        dtype = self.others.get(name, self.usual)
        if dtype is None or not weight.is_floating_point() or weight.itemsize <= dtype.itemsize:
            return weight.cpu()
        return weight.to("cpu", dtype)


class ModelExport:
    """A policy's weights as they are now, to be written when there is time.

    Make it on all ranks, since sharded weights are gathered by all; write it on rank 0.

    Args:
        policy: the policy to export. If its weights are copied, later changes do not matter.
        merge_adapters: write one full model, with a LoRA merged. False: write a LoRA's adapters
            alone, in peft's format.
        copied: copy the weights to host memory, so that training may continue.

    Raises:
        ConfigError: for a LoRA that cannot be written without its base.
    """

    def __init__(self, policy: Exported, merge_adapters: bool = True, copied: bool = False) -> None:
        self._policy = policy
        self._alone = policy.lora is not None and not merge_adapters
        weights = self._gathered()
        self._weights = in_host_memory(weights) if copied else weights

    def write(self, directory: str | Path) -> None:
        """Write weights, configuration, tokenizer and the model's own code."""
        policy, folder = self._policy, Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if self._alone:
            self._write_adapters(folder)
        else:
            self._write_model(folder)
        save_tokenizer(policy.tokenizer, folder)
        policy.loading.copy_code(policy.model, folder)

    def _gathered(self) -> dict[str, Tensor]:
        """Return the weights on the host, on rank 0; nothing on other ranks."""
        policy = self._policy
        if self._alone:
            assert policy.lora is not None
            policy.lora.require_adapters_hold_all()
            named = ((name, w) for name, w in policy.lm.state_dict().items() if ".lora_" in name)
        else:
            tied = policy.lm.config.get_text_config().tie_word_embeddings
            skipped = "lm_head.weight" if tied else None
            named = ((name, w) for name, w in policy.named_weights() if name != skipped)
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
        name, revision = base_of(self._policy.model, self._policy.loading)
        config = replace(lm.peft_config[ADAPTER], base_model_name_or_path=name, revision=revision)
        config.save_pretrained(place)


def _apart(weight: Tensor) -> Tensor:
    """Return the weight in memory of its own: an expert's may be a view of a stack."""
    whole = weight.untyped_storage().nbytes() == weight.nbytes
    return weight.contiguous() if whole else weight.clone(memory_format=torch.contiguous_format)
