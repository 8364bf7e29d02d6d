"""What to change in a configuration where vLLM does not start, by the error that it prints."""

import re

_TOO_LONG = re.compile(
    r"To serve at least one request .*?max seq len \((?P<length>\d+)\), "
    r"\((?P<needed>[\d.]+) GiB KV cache is needed.*?memory \((?P<held>[\d.]+) GiB\)\."
    r"(?:.*?maximum model length is (?P<fits>\d+)\.)?.*?(?:for more details\.|$)",
    re.MULTILINE,
)
_NO_TOKEN = re.compile(r"Cannot auto-fit max_model_len: .*?(?:`gpu_memory_utilization`\.|$)")


def with_hint(told: str) -> str:
    """Return vLLM's error at start, with the keys that help in place of vLLM's own advice.

    ``gpu_memory_utilization``, which vLLM names, has no effect on a cache of a given size.
    """
    told = _TOO_LONG.sub(_larger_cache, told)
    told = _NO_TOKEN.sub("the KV cache has no room for one token; raise engine.kv_cache_gb", told)
    lacks = "does not support LoRA" in told
    return f"{told} (set engine adapters: merged)" if lacks else told


def _larger_cache(found: re.Match[str]) -> str:
    more = float(found["needed"]) + 0.01  # vLLM rounds it
    shorter = f", or engine.max_model_len to at most {found['fits']}" if found["fits"] else ""
    return (
        f"a request of {found['length']} tokens needs {found['needed']} GiB of KV cache, which has "
        f"{found['held']}; set engine.kv_cache_gb to at least {more:.2f}{shorter}"
    )
