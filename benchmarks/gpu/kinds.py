"""Define what ``fits`` trains: models, prompts for them, and the parts of modules, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import save_model as save_experts
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.made import model_of
from lightning_rl import (
    GAE,
    Int8,
    IterablePrompts,
    Loading,
    LoRA,
    Recompute,
    SharedValueHead,
    TransformersEngine,
    Vision,
    VLLMLocal,
)
from lightning_rl.engines.base import Engine
from lightning_rl.extend import RolloutRouting
from lightning_rl.vision.loading import decode
from tests.support.tiny_vision import picture, save_vision_model


@dataclass(frozen=True)
class Kind:
    """A kind of training; ``parts`` are arguments of the module."""

    model: Callable[[Bench], Path]
    prompts: Callable[[], IterablePrompts]
    parts: dict[str, Any] = field(default_factory=dict)
    engine: Callable[[Bench], Engine] = lambda bench: TransformersEngine(device=bench.device)
    needs: str | None = None

    @property
    def lacks(self) -> str | None:
        """Return a package that it needs and that is not installed."""
        return self.needs if self.needs is not None and find_spec(self.needs) is None else None


def _digits() -> IterablePrompts:
    return IterablePrompts([{"prompt": f"{i}="} for i in range(100)])


def _pictured() -> IterablePrompts:
    """Return questions of one and of two pictures, and one without."""
    rows = []
    for shown in range(16):
        parts: list[dict[str, Any]] = [
            {"type": "image", "image": decode(picture(shown + n, 32 + 16 * (shown % 3), 32))}
            for n in range(shown % 3)
        ]
        parts.append({"type": "text", "text": f"{shown}?"})
        rows.append({"prompt": [{"role": "user", "content": parts}]})
    return IterablePrompts(rows)


def _made(bench: Bench, name: str, make: Callable[[Path], Any]) -> Path:
    """Return a model's directory, made at the first call."""
    directory = bench.scratch / "models" / name
    if not directory.exists():
        make(directory)
    return directory


def _tiny(bench: Bench) -> Path:
    return model_of(bench, "tiny", weights=True)


def _experts(bench: Bench) -> Path:
    return _made(bench, "experts", save_experts)


def _seeing(bench: Bench, family: str) -> Path:
    return _made(bench, family, lambda directory: save_vision_model(directory, family))


def _vllm(bench: Bench) -> Engine:
    return VLLMLocal(max_model_len=64, kv_cache_gb=0.05 if bench.tiny else 2.0)


def _records_experts(bench: Bench) -> Engine:
    return TransformersEngine(device=bench.device, routed_experts=True)


def _adamw8bit(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=3e-3, weight_decay=0.0)
    return optimizer


_TRAINED_TOWER = {"vision": Vision(train_tower=True, train_projector=True)}

KINDS = {
    "grpo": Kind(_tiny, _digits),
    "critic": Kind(
        _tiny,
        _digits,
        {"advantage": GAE(), "critic": SharedValueHead(), "update": {"minibatches": 2}},
    ),
    "lora": Kind(_tiny, _digits, {"lora": LoRA(rank=4)}),
    "nf4": Kind(_tiny, _digits, {"lora": {"rank": 4, "quantization": "NF4"}}, needs="bitsandbytes"),
    "int8": Kind(_tiny, _digits, {"lora": LoRA(rank=4, quantization=Int8())}),
    "recomputed": Kind(
        _tiny,
        _digits,
        {
            "loading": Loading(
                gradient_checkpointing=Recompute(inputs="host", keep="attention", mlp_tokens=8)
            )
        },
    ),
    "adamw8bit": Kind(_tiny, _digits, {"optimizer": _adamw8bit}, needs="bitsandbytes"),
    "vllm-lora": Kind(_tiny, _digits, {"lora": LoRA(rank=4)}, _vllm),
    "experts": Kind(_experts, _digits),
    "experts-replayed": Kind(
        _experts, _digits, {"routing_replay": RolloutRouting()}, _records_experts
    ),
} | {
    family: Kind(partial(_seeing, family=family), _pictured, _TRAINED_TOWER)
    for family in ("qwen2_5_vl", "qwen3_vl", "llava")
}
