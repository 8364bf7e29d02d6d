"""What two processes do with a mixture of experts in tests/integration/test_experts.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_rl.algos.experts import LoadBalance, OldRouting, RolloutRouting
from lightning_rl.callbacks import HFExport
from lightning_rl.models.sharding import ShardedStrategy
from tests.support.ranks_run import fit, run_all

REPLAYED = {"iterations": 2, "routing_replay": RolloutRouting()}


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    return {
        "ddp": lambda: fit(model, where / "ddp", "ddp", HFExport(), **REPLAYED),
        "sharded": lambda: fit(model, where / "sharded", ShardedStrategy(), HFExport(), **REPLAYED),
        "recomputed": lambda: fit(
            model,
            where / "recomputed",
            ShardedStrategy(),
            iterations=2,
            precision="bf16-mixed",
            gradient_checkpointing=True,
            routing_replay=OldRouting(),
            balance=LoadBalance(0.01),
        ),
    }


if __name__ == "__main__":
    run_all(scenarios)
