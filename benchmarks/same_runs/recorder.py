"""Record what ``same_runs`` compares; runs of any checkout load this file.

So it imports nothing of the library, and asks it for nothing but a batch and a state dict.
"""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class Digests(Callback):
    """Writes into ``folder``, by rank: a line per iteration, and the weights at the end.

    A line holds the metrics, and a digest of each tensor of the batch; the last has one of each
    weight.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = {"batch": digests(leaves(batch)), "metrics": _metrics(trainer)}
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        library = importlib.import_module("lightning_rl").__file__
        made = {"library": library, "weights": digests(dict(pl_module.state_dict()))}
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(made, indent=1))


def leaves(batch: Any) -> dict[str, Tensor]:
    """Return tensors of a TensorDict, by their names within it."""
    items = batch.items(include_nested=True, leaves_only=True)
    named = (("/".join(key) if isinstance(key, tuple) else key, value) for key, value in items)
    return {name: value for name, value in named if isinstance(value, Tensor)}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the form of each tensor, and a hash of its bits."""
    made = {}
    for name, tensor in sorted(tensors.items()):
        bits = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        made[name] = f"{form} {hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]}"
    return made


def _metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
