"""What is set of a vLLM engine, and what vLLM makes of it on the devices of this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_rl.engines.base import require_dtype
from lightning_rl.errors import ConfigError


@dataclass(frozen=True)
class EngineSettings:
    """What is set of a vLLM engine, in this process or another.

    Raises:
        ConfigError: for a value out of range.
    """

    dtype: str
    max_model_len: int | None
    kv_cache_gb: float | None
    gpu_memory_utilization: float
    max_num_seqs: int
    enable_prefix_caching: bool
    options: dict[str, Any]

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        for name in ("max_model_len", "kv_cache_gb", "gpu_memory_utilization", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"engine {name}={value} must be > 0")

    def arguments(
        self, model_dir: Path, trust_remote_code: bool = False, device: int | None = None
    ) -> dict[str, Any]:
        """Those of ``vllm.EngineArgs``, for the devices of this machine.

        ``device`` is the GPU that an engine in this process works on, by its number here; None: on
        CPUs, and for processes of their own.
        """
        on_cpu = not torch.cuda.is_available()
        if on_cpu and self.dtype == "float16":
            raise ConfigError("engine dtype='float16' is not for CPUs; use float32 or bfloat16")
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "dtype": self.dtype,
            "load_format": "dummy",  # weights come from the trainer, by a push
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            # Also beside a given cache: this share must be free for vLLM to start at all.
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.enable_prefix_caching,
            "logprobs_mode": "processed_logprobs",  # of the distribution really sampled from
            "disable_log_stats": True,
            "scheduling_policy": "priority",
            "seed": 0,
        }
        cache_gb = 0.25 if on_cpu and self.kv_cache_gb is None else self.kv_cache_gb
        if cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(cache_gb * 2**30)
        if device:  # vLLM takes the first one, unless it is told otherwise
            arguments["device_ids"] = [device]
        if on_cpu:
            arguments |= {
                "enforce_eager": True,
                # With the default of 128, prompts shorter than that never share a cached prefix.
                "block_size": 32,
                # A seeded request whose prompt is cut in two rewinds its generator, which torch's
                # CPU generator cannot do.
                "enable_chunked_prefill": False,
                # A tied head would keep a packed copy of the old embedding after each push.
                "hf_overrides": {"tie_word_embeddings": False},
            }
        if trust_remote_code:
            arguments["trust_remote_code"] = True
        options, theirs = dict(self.options), self.options.get("hf_overrides")
        if isinstance(theirs, dict):  # beside ours, not in their place
            options["hf_overrides"] = arguments.get("hf_overrides", {}) | theirs
        return arguments | options
