"""Run what learns from pictures, which several processes and one make alike.

One group of four has no picture, so that in some micro-batches only one process sees anything.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.push import Push
from lightning_rl.models.lora import LoRA
from lightning_rl.vision.loading import decode
from lightning_rl.vision.training import Vision
from tests.support.lots import LotEngine
from tests.support.ranks_run import fit, strategy_of
from tests.support.tiny_vision import picture, share_of_even


def rows() -> list[dict[str, Any]]:
    """Make three questions about a picture each, then one about none; and so on."""
    chats = []
    for number in range(12):
        text = {"type": "text", "text": f"{number}="}
        image = {"type": "image", "image": decode(picture(number, 32 + 16 * (number % 3)))}
        parts = [text] if number % 4 == 3 else [image, text]
        chats.append({"prompt": [{"role": "user", "content": parts}]})
    return chats


class Noting(LotEngine):
    """Counts the weights that each push leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: list[int] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.left_out.append(len(Push.of(weights).kept))
        super().load_weights(weights, version)


LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "ddp": ("ddp", {}),
    "sharded": ("sharded", {}),
    "sequence": ("sharded", {"sequence": 2}),
    "one": ("one", {}),
}
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "tower": {"vision": Vision(train_tower=True, train_projector=True, tower_lr=0.02)},
    "lora": {"lora": LoRA(rank=2), "vision": Vision(train_tower=True)},
}


def see(model: str, way: str, layout: str = "one", *, where: Path) -> dict[str, Any]:
    """Run shortly on pictures."""
    engine = Noting()
    data = {
        "engine": engine,
        "train_prompts": IterablePrompts(rows, shuffle=False),
        "evaluation": None,
        "rewards": [share_of_even],
    }
    kind, options = LAYOUTS[layout]
    strategy = strategy_of(kind, **options)
    seen = fit(model, where, strategy, data=data, max_tokens_per_micro_batch=60, **WAYS[way])
    return seen | {"left_out": engine.left_out}
