"""What is known of vLLM's insides, and what keeps it from changing the process around it."""

import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.engines.base import require_dtype
from lightning_rl.engines.server_process import validation_failure
from lightning_rl.errors import ConfigError, IncompleteWeightsError, WeightSyncError


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

    def arguments(self, model_dir: Path, trust_remote_code: bool = False) -> dict[str, Any]:
        """Those of ``vllm.EngineArgs``, for the devices of this machine."""
        on_cpu = not torch.cuda.is_available()
        if on_cpu and self.dtype == "float16":
            raise ConfigError("engine dtype='float16' is not for CPUs; use float32 or bfloat16")
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "dtype": self.dtype,
            "load_format": "dummy",  # weights come from the trainer, by a push
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.enable_prefix_caching,
            "logprobs_mode": "processed_logprobs",  # of the distribution really sampled from
            "disable_log_stats": True,
            "scheduling_policy": "priority",
            "seed": 0,
        }
        cache_gb = 0.25 if on_cpu and self.kv_cache_gb is None else self.kv_cache_gb
        if cache_gb is None:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        else:
            arguments["kv_cache_memory_bytes"] = int(cache_gb * 2**30)
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


def weight_shapes(model_dir: Path, trust_remote_code: bool = False) -> dict[str, torch.Size]:
    """Shapes of the model's weights under their Hugging Face names."""
    trust = {"trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir, **trust), **trust
        )
    return {name: weight.shape for name, weight in lm.state_dict().items()}


class SampledLogprobs:
    """Keeps a request's logprobs in place of vLLM's own class: one float per token.

    Ids, ranks, texts and where each token's begin, which that collects for every token, nobody asks
    for.
    """

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            # Each row is of one token, and begins with the one that was sampled.
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


def add_request(
    llm: Any, request_id: str, token_ids: Sequence[int], params: Any, priority: int
) -> str:
    """Returns the request's name inside vLLM, under which it can be aborted."""
    # With its type it is an input that needs no rendering.
    prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
    name = str(llm.add_request(request_id, prompt, params, priority=priority))
    llm.output_processor.request_states[name].logprobs_processor = SampledLogprobs()
    return name


def reload_weights(worker: Any, items: list[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker: load through the model's own loader, and check that it took all."""
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()
    # vLLM only warns of missing weights, so listen to what the model's loader says it loaded.

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(weights))
        return loaded

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(items))
    except Exception as error:  # each kind of layer has its own way to fail
        raise WeightSyncError(
            f"vLLM does not take these weights: {last_line(error)}; is the engine's model the "
            "trainer's?"
        ) from error
    finally:
        del model.load_weights
    require_all_loaded(model, loaded)


def require_all_loaded(model: Any, loaded: set[str]) -> None:
    """Runs in vLLM's worker: has a push reached all parameters of its model?

    Raises:
        IncompleteWeightsError: naming the first that it has not.
    """
    names = (name.replace(".base_layer.", ".") for name, _ in model.named_parameters())
    missing = sorted({name for name in names if ".lora_" not in name} - loaded)
    if missing:
        raise IncompleteWeightsError(
            f"the push left {len(missing)} of the engine's weights as they were, first "
            f"{missing[0]!r}; is the engine's model the trainer's?"
        )


def divert_crash_dump() -> Path:
    """The file to which vLLM from now on writes what it was computing when it failed.

    Else these thousands of characters go to the terminal, before the line that says what happened.
    To be called once an engine is there: to start one sets up vLLM's logging anew.
    """
    file = Path(tempfile.gettempdir()) / f"vllm_crash_{os.getpid()}.log"
    logger = logging.getLogger("vllm.logging_utils.dump_input")
    if logger.propagate:
        logger.propagate = False
        logger.addHandler(logging.FileHandler(file, delay=True, encoding="utf-8"))
    return file


@contextmanager
def contained() -> Iterator[None]:
    """Undo what importing and starting vLLM does to the process around it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads, hook = torch.set_num_threads, torch.get_num_threads(), sys.excepthook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            sys.excepthook = hook
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def last_line(error: BaseException) -> str:
    """The line of an error's text that says what is wrong: pydantic adds some."""
    lines = str(error).strip().splitlines()
    return validation_failure(str(error)) or (lines[-1] if lines else repr(error))
