"""What two processes do in tests/integration/test_sharded.py, each with its share of weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from lightning_rl.algos.advantages import GAE
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.callbacks import HFExport, RLCallback
from lightning_rl.models.heads import SeparateValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.reference import FrozenReference
from lightning_rl.models.sharding import ShardedStrategy
from lightning_rl.module import PolicyModule
from tests.support.lots import LotEngine
from tests.support.ranks_run import fit, in_minibatches, run_all
from tests.support.small_run import trainer_of


class Seen(RLCallback):
    """The dtypes in which a layer computes, and in which its weights are trained."""

    def __init__(self) -> None:
        self.gathered: set[str] = set()
        self.trained: set[str] = set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        layer = pl_module.policy.lm.base_model.layers[0]

        def look(module: Any, inputs: Any) -> None:
            self.gathered.add(str(module.self_attn.q_proj.weight.dtype))

        layer.register_forward_pre_hook(look)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = [p for p in pl_module.policy.parameters() if p.grad is not None]
        self.trained |= {str(x.dtype) for p in parameters for x in (p, p.grad)}
        assert all(isinstance(p, DTensor) for p in parameters)


def run(
    model: str, where: Path, strategy: Strategy | str, *extra: Any, **options: Any
) -> dict[str, Any]:
    """A short run, with what its layers computed in."""
    seen = Seen()
    callbacks = [seen] if strategy != "auto" else []
    result = fit(model, where, strategy, *extra, *callbacks, **options)
    return result | {"gathered": sorted(seen.gathered), "trained": sorted(seen.trained)}


def separate(model: str) -> dict[str, Any]:
    """A critic and a reference that are read from files of their own."""
    return {
        "advantage": GAE(),
        "value_head": SeparateValueHead(model),
        "kl": K3Penalty(),
        "reference": FrozenReference(model),
    }


def one_update() -> dict[str, Any]:
    """A single gradient step on logprobs of float32, whatever is trained.

    In a second epoch rounding would decide which ratios are clipped.
    """
    return {"iterations": 1, "ppo_epochs": 1, "data": {"engine": LotEngine("float32")}}


def loaded(model: str, where: Path, strategy: ShardedStrategy) -> dict[str, int]:
    """The most memory that building and sharding a model takes, and the bytes of the model."""
    trainer = trainer_of(where, devices=2, strategy=strategy, logger=False)
    module = PolicyModule(model, random_init=True, kl=K3Penalty())
    module.trainer = trainer
    trainer.strategy.connect(module)
    strategy.setup_environment()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module.configure_model()
    used = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    sizes = [p.numel() * 4 for p in module.parameters()]
    return {"peak": peak, "whole": sum(sizes), "largest": max(sizes), "rank": strategy.global_rank}


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    def sharded(
        name: str, *extra: Any, offload: bool = False, sequence: int = 1, **options: Any
    ) -> Any:
        strategy = ShardedStrategy(offload, sequence)
        return run(model, where / name, strategy, *extra, **options)

    return {
        "loaded": lambda: loaded(model, where / "loaded", ShardedStrategy()),
        "offload": lambda: sharded("offload", offload=True),
        "recomputed": lambda: sharded("recomputed", gradient_checkpointing=True),
        "recomputed_lora": lambda: sharded(
            "recomputed_lora",
            gradient_checkpointing=Recompute(inputs="host", mlp_tokens=16),
            lora=LoRA(rank=4),
        ),
        "separate": lambda: sharded("separate", **separate(model)),
        "sequence": lambda: sharded("sequence", sequence=2, **in_minibatches()),
        "sequence_lora": lambda: sharded(
            "sequence_lora",
            sequence=2,
            gradient_checkpointing=Recompute(inputs="host", keep="attention"),
            lora=LoRA(rank=4),
        ),
        "sequence_separate": lambda: sharded("sequence_separate", sequence=2, **separate(model)),
        "four_minibatches": lambda: sharded(
            "four_minibatches", sequence=4, processes=4, **in_minibatches()
        ),
        "four_separate": lambda: sharded(
            "four_separate",
            sequence=4,
            processes=4,
            gradient_checkpointing=True,
            **separate(model),
        ),
        "bf16": lambda: sharded("bf16", HFExport(), precision="bf16-mixed", **one_update()),
        "bf16_true": lambda: sharded("bf16_true", precision="bf16-true"),
    }


if __name__ == "__main__":
    run_all(scenarios)
