"""Run ``trl.py`` with vLLM colocated, which TRL 1.16 cannot use on CPUs as it is shipped.

Runs in this project's environment, where vLLM is, with that of TRL behind it: both have the same
torch and transformers. The shim: vLLM packs its weights for oneDNN and drops their loaders, so that
TRL's `load_weights` fails; here weights go to vLLM's `reload_weights`. And vLLM gets what ours has
on CPUs: no compilation, and blocks of 32 tokens, so that prompts of that length are shared. TRL
asks for logprobs that it does not use here; that cannot be switched off.
"""

import importlib
import os
import sys
from functools import partial
from typing import Any

LLM_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "disable_log_stats": True,
    # A tied head would keep a packed copy of the embedding that it was started with.
    "hf_overrides": {"tie_word_embeddings": False},
}


def sync_weights(generation: Any) -> None:
    """Replace ``VLLMGeneration.sync_weights``."""
    weights = dict(generation._iter_named_params())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    arguments = {"weights_iterator": iter(weights.items())}
    generation.llm.collective_rpc("reload_weights", kwargs=arguments)
    generation.llm.reset_prefix_cache()


def mend() -> None:
    """Make TRL importable, and able to generate with vLLM on a CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its CPU seconds are another process's
    sys.path.append(os.environ["TRL_PACKAGES"])
    generation = importlib.import_module("trl.generation.vllm_generation")
    generation.LLM = partial(generation.LLM, **LLM_OPTIONS)  # type: ignore[attr-defined]
    generation.VLLMGeneration.sync_weights = sync_weights


def main() -> None:
    mend()
    importlib.import_module("benchmarks.peers.trl").main()


if __name__ == "__main__":
    main()
