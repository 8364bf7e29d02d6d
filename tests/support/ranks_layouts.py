"""Measure what processes with a share of the weights hold: dtypes, and memory at the start."""

from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from benchmarks.support.allocations import peak_while
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.callbacks import RLCallback
from lightning_rl.models.parallel.strategy import ShardedStrategy
from lightning_rl.module import PolicyModule
from tests.support.ranks_run import fit
from tests.support.ranks_settings import settings_of
from tests.support.small_run import trainer_of


class Dtypes(RLCallback):
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


def computed(model: str, names: str, *, where: Path, **layout: Any) -> dict[str, Any]:
    """Run with settings; return its dtypes."""
    dtypes, options = Dtypes(), settings_of(names, model, where)
    options["callbacks"] = [*options["callbacks"], dtypes]
    result = fit(model, where, ShardedStrategy(**layout), **options)
    return result | {"gathered": sorted(dtypes.gathered), "trained": sorted(dtypes.trained)}


def loaded(model: str, *, where: Path, **layout: Any) -> dict[str, int]:
    """Return the most memory of building and sharding a model, and the model's bytes."""
    strategy = ShardedStrategy(**layout)
    trainer = trainer_of(where, devices=2, strategy=strategy, logger=False)
    module = PolicyModule(model, loading={"random_init": True}, kl=K3Penalty())
    module.trainer = trainer
    trainer.strategy.connect(module)
    strategy.setup_environment()
    peak = peak_while(module.configure_model)
    sizes = [p.numel() * 4 for p in module.parameters()]
    return {"peak": peak, "whole": sum(sizes), "largest": max(sizes)}
