"""Train as users do, in every precision; save, resume, and do it twice."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.made import adamw, model_of, rollouts_of, trainer_of
from lightning_rl import (
    PolicyModule,
    RLDataModule,
    Sampling,
    WeightSync,
)
from lightning_rl.callbacks import RLCallback
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.errors import ConfigError
from lightning_rl.extend import pack_rollouts

ITERATIONS = 2
ALWAYS = ("32-true", "bf16-mixed")
"""Precisions that no version of the library refuses."""


def evens_share(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Return the share of written tokens with even numbers, which a random model can learn."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Watch(RLCallback):
    """Keeps the rows of metrics, and the state that training began with."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizer: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = {name: w.clone() for name, w in pl_module.state_dict().items()}
        self.optimizer = [x.clone() for x in _tensors(trainer.optimizers[0].state_dict()["state"])]

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self.rows.append(metrics)


def fit(bench: Bench, precision: str, kinds: Sequence[str] = ("grpo", "critic", "lora")) -> None:
    """Train each kind for two iterations, checkpoint it, and train two more from there."""
    for name in kinds:
        if (package := KINDS[name].lacks) is not None:
            bench.note({name: f"skipped: {package} is not installed"})
            continue
        with bench.case(name):
            try:
                _save_and_resume(bench, name, precision)
            except ConfigError as refusal:
                if precision in ALWAYS:
                    raise
                raise Skipped(str(refusal)) from refusal


def _save_and_resume(bench: Bench, name: str, precision: str) -> None:
    checkpoint = bench.scratch / f"{name}-{precision}.ckpt"
    first, watch = _run(bench, name, precision)
    first.save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, map_location=bench.device, weights_only=True)
    began, rows = watch.weights, watch.rows
    moved = [not torch.equal(w, began[key]) for key, w in saved["state_dict"].items()]
    second, watch = _run(bench, name, precision, str(checkpoint))
    module = second.lightning_module
    assert isinstance(module, PolicyModule)

    def most(metric: str) -> float:
        return max(row.get(metric, 0.0) for row in rows)

    bench.note(
        {
            name: {
                "weights moved": sum(moved) / len(moved),
                "probe gap": most("sync/probe_gap"),
                "logprob gap": most("rollout/logprob_gap_max"),
                "skipped steps": most("policy/nonfinite_skipped"),
                "dtype": str(next(module.parameters()).dtype),
            }
        }
    )
    bench.require(any(moved), f"{name}: no weight has moved")
    bench.require(
        all(torch.equal(w, watch.weights[key]) for key, w in saved["state_dict"].items()),
        f"{name}: resumed with other weights than were saved",
    )
    states = list(_tensors(saved["optimizer_states"][0]["state"]))
    bench.require(
        len(states) == len(watch.optimizer)
        and all(torch.equal(a, b.to(a)) for a, b in zip(states, watch.optimizer, strict=True)),
        f"{name}: resumed with another state of the optimizer than was saved",
    )
    bench.require(module.iteration == 2 * ITERATIONS, f"{name}: ended at {module.iteration}")
    sound = all(w.isfinite().all() for w in module.state_dict().values())
    bench.require(sound, f"{name}: weights are not finite")


def _run(
    bench: Bench, name: str, precision: str, checkpoint: str | None = None
) -> tuple[Trainer, Watch]:
    """Run one epoch, or a second from a checkpoint."""
    kind = KINDS[name]
    seed_everything(0, verbose=False)
    parts = {"optimizer": adamw(3e-3)} | kind.parts
    module = PolicyModule(str(kind.model(bench)), **parts)
    data = RLDataModule(
        kind.prompts(),
        [evens_share],
        kind.engine(bench),
        sampling=Sampling(max_tokens=6),
        group_size=4,
        groups_per_iteration=4,
        iterations_per_epoch=ITERATIONS,
    )
    watch = Watch()
    trainer = trainer_of(
        bench,
        max_epochs=1 if checkpoint is None else 2,
        precision=precision,
        callbacks=[WeightSync(), watch],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return trainer, watch


def update_twice(bench: Bench) -> None:
    """Check whether the weights are the same bits when the same update is done again."""
    for precision in ("32-true", "bf16-mixed"):
        for deterministic in (False, True):
            name = f"{precision}{' deterministic' if deterministic else ''}"
            with bench.case(name):
                first, second = (_updated(bench, precision, deterministic) for _ in range(2))
                pairs = list(zip(first, second, strict=True))
                apart = max(float((a - b).abs().max()) for a, b in pairs)
                bench.note({name: {"equal": apart == 0.0, "largest difference": apart}})
                if deterministic:  # else torch promises nothing
                    bench.require(apart == 0.0, f"{name}: weights differ by {apart:.2g}")


def _updated(bench: Bench, precision: str, deterministic: bool) -> list[Tensor]:
    """Return weights after two iterations on given rollouts."""
    seed_everything(0, verbose=False)
    count, tokens = (8, 12) if bench.tiny else (64, 200)
    module = PolicyModule(str(model_of(bench, "small", weights=True)), optimizer=adamw(1e-3))
    trainer = trainer_of(bench, precision=precision, deterministic=deterministic)
    try:
        batches = LazyLoader(lambda n: pack_rollouts(rollouts_of(count, tokens, seed=n)), 2)
        trainer.fit(module, batches)
    finally:
        torch.use_deterministic_algorithms(False)
    return [weight.detach().clone() for weight in module.state_dict().values()]


def _tensors(state: dict[int, dict[str, Any]]) -> Iterator[Tensor]:
    for of_parameter in state.values():
        yield from (value for value in of_parameter.values() if isinstance(value, Tensor))
