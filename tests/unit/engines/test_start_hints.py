"""Test that vLLM's errors at start name our keys, and none that has no effect."""

import pytest

from lightning_rl.engines.start_hints import with_hint

LONG = (
    "To serve at least one request with the model's max seq len (8192), (0.35 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.25 GiB). {fits}Try increasing "
    "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
    "`max_model_len` when initializing the engine. See https://docs.vllm.ai/ for more details."
)
FITS = "Based on the available memory, the estimated maximum model length is 5792. "
TOLD = (
    "a request of 8192 tokens needs 0.35 GiB of KV cache, which has 0.25; set engine.kv_cache_gb "
    "to at least 0.36"
)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (LONG.format(fits=FITS), f"{TOLD}, or engine.max_model_len to at most 5792"),
        (LONG.format(fits=""), TOLD),
        (f"ValueError: {LONG.format(fits='')} | Exit.", f"ValueError: {TOLD} | Exit."),
        (
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single "
            "token. Try increasing `gpu_memory_utilization`.",
            "the KV cache has no room for one token; raise engine.kv_cache_gb",
        ),
        (
            "X does not support LoRA",
            "X does not support LoRA (set engine adapters: merged)",
        ),
        ("anything else", "anything else"),
    ],
)
def test_hints(told, expected):
    assert with_hint(told) == expected
