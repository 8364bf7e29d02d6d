"""RolloutWriter: collected rollouts as a JSONL file, without training."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.hooks import RLCallback
from lightning_rl.rollout import Rollout


class RolloutWriter(RLCallback):
    """Appends every rollout of ``lightning-rl rollout`` to ``path``, one JSON object per line."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.written = 0

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: list[Rollout],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as lines:
            for rollout in outputs:
                record = {"id": rollout.id} | rollout.to_dict()
                lines.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        self.written += len(outputs)
