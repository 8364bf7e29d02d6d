"""Models without weights: what a process builds that will get its share of them from another."""

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_rl.models.pretrained import Loading


def without_weights() -> bool:
    """Whether what is built now is to have shapes only (``with torch.device("meta"):``)."""
    return torch.get_default_device().type == "meta"


def skeleton(
    config: PretrainedConfig,
    loading: Loading,
    attention: str,
    kind: type[AutoModel] | type[AutoModelForCausalLM] = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The parameters that ``from_pretrained`` would give, in float32, on the meta device."""
    made: PreTrainedModel = kind.from_config(
        config, attn_implementation=attention, trust_remote_code=loading.trust_remote_code
    )
    return made.float()
