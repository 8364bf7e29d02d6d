"""Arguments of trusted classes that hand something on to what runs code: only known ones pass."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_rl.cli.sources import Key, name_of
from lightning_rl.errors import ConfigError

ENVIRONMENT = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "VLLM_LOGGING_LEVEL",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
    ]
)
"""Variables that name no code: unlike LD_PRELOAD or PYTHONPATH."""
ENGINE_OPTIONS = frozenset(
    [
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_cascade_attn",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enforce_eager",
        "kv_cache_dtype",
        "long_prefill_token_threshold",
        "max_long_partial_prefills",
        "max_logprobs",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_seqs",
        "pipeline_parallel_size",
        "seed",
        "swap_space",
        "tensor_parallel_size",
    ]
)
"""Arguments of vLLM that are numbers and switches: many others name classes, plugins or files."""
RAY_OPTIONS = frozenset(
    [
        "include_dashboard",
        "log_to_driver",
        "namespace",
        "num_cpus",
        "num_gpus",
        "object_store_memory",
    ]
)
MODEL_OPTIONS = frozenset(["dtype", "torch_dtype", "low_cpu_mem_usage", "revision"])

_MAPPINGS: dict[str, Collection[str]] = {
    "environment": ENVIRONMENT,
    "options": ENGINE_OPTIONS,
    "ray_options": RAY_OPTIONS,
    "model_kwargs": MODEL_OPTIONS,
    "tokenizer_kwargs": MODEL_OPTIONS,
    "processor_kwargs": MODEL_OPTIONS,
}
_HERE = {"auto", "local", "127.0.0.1", "localhost", "[::1]"}


def require_harmless(tree: Any, trusted: Sequence[str], place: str = "") -> None:
    """Refuse arguments through which a trusted class would run a stranger's code.

    Raises:
        ConfigError: naming the key, the value and the reason.
    """
    for key, value, owner in _nodes(tree, (), ""):
        reason = _reason(key[-1] if key else "", value, owner, trusted)
        if reason:
            raise ConfigError(f"{place}{name_of(key)}: {reason}; leave it out")
    for key, value, owner in _nodes(tree, (), ""):
        known = _MAPPINGS.get(str(key[-1])) if key else None
        if known is None or not isinstance(value, dict):
            continue
        if "class_path" in value or owner == "OpenAIJudge":  # whose options are sent, and no more
            continue
        for stray in sorted(map(str, value.keys() - set(known))):
            raise ConfigError(
                f"{place}{name_of((*key, stray))}: {value[stray]!r:.60} may run code, as it is "
                f"none of those known not to ({', '.join(sorted(known))}); leave it out"
            )


def as_parsed(value: Any) -> Any:
    """What the parser makes of a value: texts may hold lists, mappings and switches as YAML."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        return value


def _reason(name: Any, value: Any, owner: str, trusted: Sequence[str]) -> str | None:
    """Why a value may not stand there, if so."""
    if name == "trust_remote_code" and value:
        return f"{value!r} runs code that comes with a model"
    if name == "weights_only" and value is False:
        return "false unpickles objects, which runs code"
    if name == "ckpt_path" and "://" in str(value):
        return f"{value!r} would be unpickled, which runs code: download it, and name the file"
    if name == "sandbox" and owner == "PythonTests" and value is False:
        return "false runs what a model wrote, or the data's tests, unprotected"
    if name == "address" and value and not {str(value), str(value).rpartition(":")[0]} & _HERE:
        return f"{value!r}: a Ray cluster may run what it likes in its drivers"
    if name == "environment" and owner.startswith("Verifiers") and value not in trusted:
        return f"{value!r} imports a module; read its code, then add --trust {value}, or"
    return None


def _nodes(node: Any, key: Key, owner: str) -> Iterator[tuple[Key, Any, str]]:
    """All nodes, with the last part of the nearest class_path around them."""
    node = as_parsed(node)
    yield key, node, owner
    if isinstance(node, dict):
        if "class_path" in node:
            owner = str(node["class_path"]).rpartition(".")[2]
        for name, inner in node.items():
            yield from _nodes(inner, (*key, name), owner)
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from _nodes(inner, (*key, index), owner)
