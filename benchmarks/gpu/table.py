"""List the checks by name, in the order in which they run; nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """A function that looks at one thing, in a process of its own.

    ``target`` is ``module:function``, which gets a :class:`~benchmarks.gpu.bench.Bench` and the
    ``options``. After ``limit_s`` seconds it is ended. Where the package ``needs`` is not
    installed, it is skipped.
    """

    name: str
    target: str
    limit_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


def _ours(name: str, function: str, limit_s: float, **options: Any) -> Check:
    return Check(name, f"benchmarks.gpu.{function}", limit_s, options)


def _with_vllm(name: str, function: str, limit_s: float, **options: Any) -> Check:
    return Check(name, f"benchmarks.gpu.{function}", limit_s, options, needs="vllm")


CHECKS = (
    _ours("machine", "machine:describe", 60),
    # Does it train at all, and right?
    _ours("attention", "kernels:attention", 60),
    _ours("shared-queries", "kernels:shared_queries", 60),
    _ours("fit-bf16-mixed", "fits:fit", 90, precision="bf16-mixed"),
    _ours("fit-32-true", "fits:fit", 90, precision="32-true"),
    _ours("fit-bf16-true", "fits:fit", 90, precision="bf16-true"),
    _ours(
        "fit-quantized",
        "fits:fit",
        120,
        precision="bf16-mixed",
        kinds=("nf4", "int8", "adamw8bit"),
    ),
    _ours("fit-recomputed", "fits:fit", 60, precision="bf16-mixed", kinds=("recomputed",)),
    _ours(
        "fit-experts",
        "fits:fit",
        90,
        precision="bf16-mixed",
        kinds=("experts", "experts-replayed"),
    ),
    _ours(
        "fit-pictures",
        "fits:fit",
        120,
        precision="bf16-mixed",
        kinds=("qwen2_5_vl", "qwen3_vl", "llava"),
    ),
    _ours("update-twice", "fits:update_twice", 60),
    # Does the engine hold the trainer's weights, and let go of the memory?
    _with_vllm("engine-memory", "engines:memory", 150),
    _with_vllm("push-tied", "engines:push", 120, tied=True, dtype="bfloat16"),
    _with_vllm("push-untied", "engines:push", 120, tied=False, dtype="bfloat16"),
    _with_vllm("push-float32", "engines:push", 120, tied=True, dtype="float32"),
    _with_vllm("push-in-flight", "engines:push_in_flight", 120),
    _with_vllm("fit-vllm", "fits:fit", 150, precision="bf16-mixed", kinds=("vllm-lora",)),
    # These checks measure how long it takes, and in how much memory.
    _ours("update-0.5B", "updates:update", 120, shape="0.5B"),
    _ours("compiled", "compiled:compiled", 150, shape="qwen3-0.6b"),
    _ours("compiled-rounding", "compiled:rounding", 90, shape="qwen3-0.6b"),
    _ours("head-chunks", "kernels:head_chunks", 60),
    _ours("digests", "digests:cost", 60),
    _ours("host-inputs", "recomputed:host_inputs", 150),
    _with_vllm("recipe", "recipe:three_iterations", 240),
    _with_vllm("gap-bfloat16", "engines:gap", 120, dtype="bfloat16"),
    _with_vllm("gap-float32", "engines:gap", 120, dtype="float32"),
    _with_vllm("tokens-per-second", "engines:speed", 150),
    _with_vllm("tokens-per-second-v2", "engines:speed", 150, model_runner_v2=True),
    _with_vllm("sleep", "engines:sleep", 120),
    _ours("update-1.5B", "updates:update", 150, shape="1.5B"),
    _ours("tests", "recipe:tests", 240),
    # Several GPUs; skipped where there is one.
    _ours("layouts", "layouts:equal", 300, kind="qwen3"),
    _ours("layouts-experts", "layouts:equal", 300, kind="qwen3_moe"),
    _with_vllm("push-shared", "layouts:shared_push", 300),
)
