"""What the processes of tests/integration/test_expert.py do: they have experts together.

Run as tests/support/ranks_run.py, with a folder of models: ``some``, whose tokens choose some of
the experts, ``all``, whose tokens choose all, so that rounding chooses none, ``few``, which has
two, and ``deep``.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rl.algos.experts import LoadBalance, OldRouting, RolloutRouting
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.callbacks import HFExport
from lightning_rl.models.lora import LoRA
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.reference import BaseReference, PeriodicReference
from lightning_rl.models.sharding import ShardedStrategy
from tests.support.ranks_resume import kept
from tests.support.ranks_run import critic, fit, in_minibatches, run_all
from tests.support.ranks_sharded import loaded, one_update, run, separate

OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda model: in_minibatches(),
    "clipped": lambda model: critic() | {"max_grad_norm": 0.1},
    "lora": lambda model: {"lora": LoRA(rank=4), "kl": K3Penalty(), "reference": BaseReference()},
    "renewed": lambda model: {"kl": K3Penalty(), "reference": PeriodicReference(1)},
    "separate": separate,
}
"""Of runs that are compared with those of one process."""
REPLAYED: dict[str, Any] = {"iterations": 2, "routing_replay": RolloutRouting()}
BALANCED: dict[str, Any] = {
    "iterations": 2,
    "routing_replay": OldRouting(),
    "balance": LoadBalance(0.01),
    "gradient_checkpointing": Recompute(inputs="host", keep="attention"),
}
"""Metrics of experts are of packs, which are the same in as many processes."""


def spread(expert: int = 2, folder: bool = False, **options: Any) -> ShardedStrategy:
    """Processes have experts together; checkpoints are a file each, or a folder."""
    return ShardedStrategy(expert=expert, save_distributed_checkpoint=folder, **options)


def scenarios(models: str, where: Path) -> dict[str, Callable[[], Any]]:
    model, some = str(Path(models) / "all"), str(Path(models) / "some")

    def trained(
        name: str, option: str, processes: int = 2, of: str = model, **strategy: Any
    ) -> dict[str, Callable[[], Any]]:
        export, options = HFExport(merge_adapters=True), OPTIONS[option](of)
        place = where / name
        return {
            name: lambda: fit(of, place, spread(**strategy), export, processes=processes, **options)
        }

    keep = partial(kept, model, where)
    found: dict[str, Callable[[], Any]] = {}
    for option in OPTIONS:
        found |= trained(option, option)
    return (
        found
        | trained("offload", "plain", cpu_offload=True)
        | trained("four_plain", "plain", 4)
        | trained("four_clipped", "clipped", 4)
        | trained("four_rows", "plain", 4, of=str(Path(models) / "few"))
        | trained("four_all", "plain", 4, expert=4)
        | trained("four_both", "clipped", 4, sequence=2)
        | keep("saved_file", spread())
        | keep("saved_folder", spread(folder=True))
        | keep("saved_data", ShardedStrategy(save_distributed_checkpoint=True))
        | keep("file_to_data", ShardedStrategy(), of="saved_file")
        | keep("folder_to_data", ShardedStrategy(), of="saved_folder")
        | keep("data_to_expert", spread(), of="saved_data")
        | keep("one_to_expert", spread(folder=True), of="alone/whole")
        | keep("four_folder", spread(folder=True), 4)
        | keep("four_on", spread(4), 4, of="four_folder")
        | keep("folder_from_four", spread(), of="four_folder")
        | {
            "replayed": lambda: fit(some, where / "replayed", spread(), HFExport(), **REPLAYED),
            "balanced": lambda: fit(some, where / "balanced", spread(), **BALANCED),
            "balanced_data": lambda: fit(
                some, where / "balanced_data", ShardedStrategy(), **BALANCED
            ),
            "loaded": lambda: loaded(str(Path(models) / "deep"), where / "loaded", spread()),
        }
        | {
            name: partial(
                run, model, where / name, strategy, precision="bf16-mixed", **one_update()
            )
            for name, strategy in {"bf16": spread(), "bf16_data": ShardedStrategy()}.items()
        }
    )


if __name__ == "__main__":
    run_all(scenarios)
