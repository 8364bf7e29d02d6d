"""Provide a short run that one process and several make alike, and what a test compares of it."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from lightning_rl.callbacks import IterationCheckpoint, RLCallback, StepTimer, WeightSync
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.sampling import Sampling
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.parallel.strategy import ShardedStrategy
from lightning_rl.module import PolicyModule
from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule
from tests.support.grouped import grouped
from tests.support.lots import LotEngine
from tests.support.small_run import trainer_of

GROUPS, GROUP_SIZE = 4, 3
ITERATIONS = 2


class Seen(RLCallback):
    """Records metrics, what was monitored, and the rollouts that this rank trained on."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.monitored: list[dict[str, float]] = []
        self.rollouts: list[list[tuple[str, list[int]]]] = []
        self.start = 0.0
        """The sum of the trained weights' sizes."""

    def setup(self, trainer, pl_module, stage) -> None:
        # Just before the model is made. What is drawn at random for it, such as a LoRA, is rank 0's
        # on all ranks.
        torch.manual_seed(11 + int(os.environ.get("RANK", 0)))

    def on_train_start(self, trainer, pl_module) -> None:
        trained = (p.detach() for p in pl_module.policy.parameters() if p.requires_grad)
        self.start = sum(float(full_tensor(weight).double().abs().sum()) for weight in trained)

    def on_update_start(self, trainer, pl_module, batch) -> None:
        trained = trainer.train_dataloader.current
        self.rollouts.append([(r.id, r.token_ids) for r in trained])

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows.append(dict(metrics))
        known = trainer.callback_metrics
        timed = ("time/", "sync/seconds")
        self.monitored.append({n: float(v) for n, v in known.items() if not n.startswith(timed)})


def share_of_even_digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return rewards that differ within groups, so that all of them teach something."""
    return [
        sum(c in "02468" for c in completion) / max(1, len(completion))
        for completion in completions
    ]


def rows(count: int = 40) -> Iterable[dict[str, str]]:
    return [{"prompt": f"{i % 10}{i // 10}="} for i in range(count)]


def prompts(seed: int = 3) -> IterablePrompts:
    return IterablePrompts(rows, seed=seed)


def fit(
    model: str,
    where: Path,
    strategy: Strategy | str = "auto",
    *,
    callbacks: Iterable[Any] = (),
    schedule: SyncSchedule = FixedSchedule(),
    iterations: int = ITERATIONS,
    epochs: int = 1,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    precision: Any = "32-true",
    **options: Any,
) -> dict[str, Any]:
    """Fit shortly in this process, together with the others of its group."""
    settings: dict[str, Any] = {
        "engine": LotEngine(),
        "train_prompts": prompts(),
        "evaluation": IterablePrompts(lambda: rows(5)),
        "rewards": [share_of_even_digits],
        "sampling": Sampling(max_tokens=6),
        "groups_per_iteration": GROUPS,
        "group_size": GROUP_SIZE,
        "iterations_per_epoch": iterations,
        "seed": 5,
    }
    module = PolicyModule(
        model,
        **grouped(
            **{
                # Not Adam, to which a gradient that is twice too large is the same.
                "optimizer": lambda p: torch.optim.SGD(p, lr=0.01),
                "max_grad_norm": None,
                "max_tokens_per_micro_batch": 24,
                "ppo_epochs": 2,
                "seed": 7,
                **options,
            }
        ),
    )
    seen = Seen()
    trainer = trainer_of(
        where,
        [WeightSync(schedule=schedule), *callbacks, seen, StepTimer()],
        devices=1 if strategy == "auto" else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        precision=precision,
        max_epochs=epochs,
        logger=CSVLogger(where),
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
    )
    trainer.fit(module, RLDataModule(**settings | (data or {})), ckpt_path=ckpt_path)
    kept = ("rows", "monitored", "rollouts", "start")
    return {name: getattr(seen, name) for name in kept} | {"where": where}


def strategy_of(kind: str, **layout: Any) -> Strategy | str:
    """Return ``one`` process, or one of the strategies, with its options."""
    if kind == "fsdp":
        layout = {"save_distributed_checkpoint": False} | layout
        return ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1, **layout)
    strategies = {"one": lambda: "auto", "ddp": DDPStrategy, "sharded": ShardedStrategy}
    return strategies[kind](**layout)


def failure(call: Callable[[], Any]) -> dict[str, str]:
    """Return the class and the message of what it raises."""
    try:
        call()
    except Exception as error:  # whatever it is: the test looks at it
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "none", "message": ""}
