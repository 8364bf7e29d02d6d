"""Settings of vLLM engines, and the arguments that they become on this machine's devices."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.lora import LoRAEngine
from lightning_rl.engines.vllm.lora import RANKS, lora_options
from lightning_rl.engines.vllm.start import graphs, lasting
from lightning_rl.errors import ConfigError
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.machine import lacks_adapters, read_vllm_version

_log = logging.getLogger(__name__)

_QUANTIZED_ON_CPUS = "fp8_per_channel"
"""The only quantization of 16-bit weights that vLLM's CPU build supports for pushes."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a vLLM engine, in this process or another; see :class:`VLLMEngine`.

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
    cast_lm_head_to_fp32: bool | None = None
    quantization: str | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_gb", "gpu_memory_utilization", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"engine {name}={value} must be > 0")

    def arguments(
        self, model_dir: Path, trust_remote_code: bool = False, device: int | None = None
    ) -> dict[str, Any]:
        """Return arguments of ``vllm.EngineArgs``, for the devices of this machine.

        ``device`` is the index of the GPU used by an engine in this process; None: on CPUs, and for
        separate processes.

        Raises:
            ConfigError: for settings that these devices do not support.
        """
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            self._require_cpu()
        arguments: dict[str, Any] = {
            "model": str(model_dir if on_cpu else lasting(model_dir)),  # CPUs compile nothing
            "dtype": self.dtype,
            "load_format": "dummy",  # weights come from the trainer, by a push
            "max_model_len": self.max_model_len or -1,  # as much as fits into the cache
            "max_num_seqs": self.max_num_seqs,
            # Also beside a given cache: this share must be free for vLLM to start at all.
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.enable_prefix_caching,
            "logprobs_mode": "processed_logprobs",  # of the distribution really sampled from
            "disable_log_stats": True,
            "scheduling_policy": "priority",
            "seed": 0,
        }
        overrides: dict[str, Any] = {}
        cache_gb = 0.25 if on_cpu and self.kv_cache_gb is None else self.kv_cache_gb
        if cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(cache_gb * 2**30)
        if device:  # vLLM takes the first one, unless it is told otherwise
            arguments["device_ids"] = [device]
        if self.quantization is not None:
            arguments["quantization"] = self.quantization
        if self.cast_lm_head_to_fp32 and self.dtype != "float32":
            overrides["head_dtype"] = "float32"
        if on_cpu:
            arguments |= {
                "enforce_eager": True,
                # With the default of 128, prompts shorter than that never share a cached prefix.
                "block_size": 32,
                # A seeded request whose prompt is cut in two rewinds its generator, which torch's
                # CPU generator cannot do.
                "enable_chunked_prefill": False,
                # And without such cuts vLLM cannot cache the states of recurrent layers.
                "enable_prefix_caching": self.enable_prefix_caching and not _recurs(model_dir),
            }
            # A tied head would keep a packed copy of the old embedding after each push.
            overrides["tie_word_embeddings"] = False
        else:
            arguments |= graphs(self.max_num_seqs, self.options)
        if trust_remote_code:
            arguments["trust_remote_code"] = True
        options, theirs = dict(self.options), self.options.get("hf_overrides", {})
        if isinstance(theirs, dict) and (overrides or theirs):  # beside ours, not in their place
            options["hf_overrides"] = overrides | theirs
        return arguments | options

    def _require_cpu(self) -> None:
        if self.dtype == "float16":
            raise ConfigError(
                "engine dtype='float16' is not supported on CPUs; use float32 or bfloat16"
            )
        if self.quantization not in (None, _QUANTIZED_ON_CPUS):
            raise ConfigError(
                f"engine quantization={self.quantization!r} is not supported on CPUs, where vLLM "
                f"has no kernel for it; use {_QUANTIZED_ON_CPUS}, or null"
            )
        if self.batch_invariant:
            raise ConfigError(
                "engine batch_invariant=true is not supported on CPUs, since vLLM's "
                "batch-invariant kernels need a GPU; leave it out (in float32 a request's tokens "
                "do not depend on its batch)"
            )

        if self.options.get("speculative_config"):
            raise ConfigError(
                "engine options.speculative_config is not supported on CPUs, where vLLM (tried "
                "with 0.32) then samples tokens of other probabilities and returns nan for their "
                "logprobs; leave it out"
            )

    def environment(self) -> dict[str, str]:
        """Return environment variables of vLLM's process, in addition to the inherited ones."""
        variables = {}
        if self.batch_invariant:
            variables["VLLM_BATCH_INVARIANT"] = "1"
        if self.dtype == "float32":
            # FlashAttention has no float32, so vLLM takes its Triton kernels, and Triton by itself
            # multiplies float32 as TF32: 10 bits of mantissa, not 23.
            variables["TRITON_F32_DEFAULT"] = "ieee"
        return variables


_RECURRENT = re.compile(r'"\w*(mamba|ssm_|linear_|conv_|state_size)\w*":')
"""Names in the configurations of models some of whose layers keep a state in place of keys."""


def _recurs(model_dir: Path) -> bool:
    """Tell whether a model has recurrent layers: Mamba, linear attention, or convolutions."""
    return bool(_RECURRENT.search((model_dir / "config.json").read_text(encoding="utf-8")))


@configurable
class VLLMEngine(LoRAEngine):
    """The settings common to all vLLM engines, and how they follow the trainer's.

    Args:
        dtype: dtype of the engine's weights; None: the trainer's, but ``bfloat16`` on GPUs.
        max_model_len: maximum tokens of prompt plus completion; None: what the longest prompt and
            ``max_tokens`` take, or, where requests may get longer, as much as fits into the KV
            cache, at most the model's maximum.
        kv_cache_gb: size of the KV cache in GiB per process; None: chosen by vLLM from
            ``gpu_memory_utilization`` (on CPUs 0.25, since vLLM would take nearly all memory).
        gpu_memory_utilization: share of the GPU's memory that a vLLM process may use.
        max_num_seqs: maximum requests that one engine or replica computes together; others wait.
        enable_prefix_caching: share the KV cache of equal prompt prefixes.
        cast_lm_head_to_fp32: compute logits in float32 even if ``dtype`` has 16 bits; None: if the
            trainer does.
        quantization: a vLLM quantization that weights are rounded to when they arrive, such as
            ``fp8``; None: none. It makes the engine faster, and its gap to the trainer larger.
        batch_invariant: make a request's tokens on a GPU independent of the rest of its batch;
            slower. ``VLLMLocal`` must be created before vLLM or the GPU is used in this process.
        adapters: ``apart``: the LoRA stays unmerged, and a push contains it alone; ``merged``: the
            engine computes with merged weights; None: ``apart`` if ``dtype`` has 16 bits and vLLM
            supports it.
        options: further arguments of ``vllm.EngineArgs``; not for servers that already run.

    Raises:
        ConfigError: for a value out of range.
    """

    def __init__(
        self,
        dtype: str | None = None,
        max_model_len: int | None = None,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        cast_lm_head_to_fp32: bool | None = None,
        quantization: str | None = None,
        batch_invariant: bool = False,
        adapters: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.choose_dtype(dtype)
        self.choose_adapters(adapters)
        self._settings = EngineSettings(
            dtype=self.dtype,
            max_model_len=max_model_len,
            kv_cache_gb=kv_cache_gb,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            options=dict(options or {}),
            cast_lm_head_to_fp32=cast_lm_head_to_fp32,
            quantization=quantization,
            batch_invariant=batch_invariant,
        )
        self.max_model_len = max_model_len
        self._longest: int | None = None

    def configure_dtype(self, dtype: str) -> None:
        super().configure_dtype(self._dtype_beside(dtype) if self.chosen_dtype is None else dtype)

    def _dtype_beside(self, trainer: str) -> str:
        if trainer != "float32" or not torch.cuda.is_available():
            return trainer
        _warn_of_bfloat16()
        return "bfloat16"

    def configure_head(self, fp32: bool) -> None:
        if self._settings.cast_lm_head_to_fp32 is None and not self.running:
            self._settings = replace(self._settings, cast_lm_head_to_fp32=fp32)

    def configure_length(self, longest: Callable[[], int | None]) -> None:
        chosen = self.max_model_len or self._settings.options.get("max_model_len")
        if chosen is None and not self.running:
            self._longest = longest()

    @property
    def precision(self) -> str:
        return self._settings.quantization or self.dtype

    @property
    def settings(self) -> EngineSettings:
        """The settings, including those that follow from the trainer and the prompts."""
        lora = {} if self.lora_rank is None else lora_options(1, self.lora_rank)
        options, length = self._settings.options | lora, self.max_model_len or self._longest
        return replace(self._settings, dtype=self.dtype, max_model_len=length, options=options)

    def memory_here(self, elements: int, card: int) -> tuple[int, int]:
        """Return the GPU memory that vLLM takes: its share, or weights plus a given KV cache.

        It takes nothing while it sleeps; the whole share has to be free when it starts.
        """
        if self.serves_all_ranks:
            return super().memory_here(elements, card)
        share = int(card * self._settings.gpu_memory_utilization)
        if self.sleep_level is not None:
            return 0, share
        if self._settings.kv_cache_gb is None:
            return share, share
        weights = elements * (4 if self.chosen_dtype == "float32" else 2)  # as on a GPU
        return weights + int(self._settings.kv_cache_gb * 2**30), share

    def must_merge(self, rank: int) -> str | None:
        if (why := self._lacks_adapters()) is not None:
            return why
        settings = self._settings
        if rank > RANKS[-1]:
            return f"vLLM supports rank {RANKS[-1]} at most, but lora has {rank}"
        if self.sleep_level == 2:
            return "with sleep_level=2 that is not tested"
        if settings.quantization not in (None, _QUANTIZED_ON_CPUS):
            return f"with quantization={settings.quantization!r} that is not tested"
        if settings.batch_invariant:
            return "with batch_invariant=true that is not tested"
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            parts = max(getattr(self, name, 1), settings.options.get(name, 1))
            if parts > 1:
                return f"with {name}={parts} that is not tested"
        return None

    def _lacks_adapters(self) -> str | None:
        """Return why the installed vLLM cannot keep adapters unmerged; None if it can."""
        return lacks_adapters(read_vllm_version())


@cache
def _warn_of_bfloat16() -> None:
    if dist.rank() == 0:
        _log.warning(
            "the trainer computes in float32, but the engine on GPUs in bfloat16 (it has no flash "
            "attention in float32), so their logprobs differ by some hundredths of a nat; set "
            "trainer.precision: bf16-mixed to round alike, or engine.dtype: float32 to be exact"
        )
