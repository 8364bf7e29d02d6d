"""What the processes of tests/integration/test_tensor.py do: they have matrices together.

Run as tests/support/ranks_run.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rl.algos.kl import K3Penalty
from lightning_rl.callbacks import HFExport
from lightning_rl.models.lora import LoRA
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.reference import BaseReference, PeriodicReference
from lightning_rl.models.sharding import ShardedStrategy
from tests.support.ranks_resume import kept
from tests.support.ranks_run import critic, fit, in_minibatches, run_all, sharded
from tests.support.ranks_sharded import loaded, one_update, run, separate

OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda model: in_minibatches(),
    "recomputed": lambda model: {"gradient_checkpointing": Recompute(inputs="host", mlp_tokens=16)},
    "lora": lambda model: {"lora": LoRA(rank=4), "kl": K3Penalty(), "reference": BaseReference()},
    "renewed": lambda model: {"kl": K3Penalty(), "reference": PeriodicReference(1)},
    "critic": lambda model: critic() | {"max_grad_norm": 0.1},
    "separate": separate,
}
"""Of runs that are compared with those of one process."""


def split(folder: bool = False, **options: Any) -> ShardedStrategy:
    """Two processes have matrices together; checkpoints are a file each, or a folder."""
    return ShardedStrategy(tensor=2, save_distributed_checkpoint=folder, **options)


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    def trained(
        name: str, option: str, processes: int = 2, **strategy: Any
    ) -> dict[str, Callable[[], Any]]:
        export = HFExport(merge_adapters=True)
        options = OPTIONS[option](model)
        place = where / name
        return {
            name: lambda: fit(
                model, place, split(**strategy), export, processes=processes, **options
            )
        }

    keep = partial(kept, model, where)
    found: dict[str, Callable[[], Any]] = {}
    for option in OPTIONS:
        found |= trained(option, option)
    return (
        found
        | trained("offload", "plain", cpu_offload=True)
        | trained("four_critic", "critic", 4)
        | trained("four_lora", "lora", 4)
        | trained("four_both", "critic", 4, sequence=2)
        | keep("saved_file", split())
        | keep("saved_folder", split(True))
        | keep("saved_data", sharded(True))
        | keep("file_to_data", ShardedStrategy(), of="saved_file")
        | keep("folder_to_data", ShardedStrategy(), of="saved_folder")
        | keep("data_to_tensor", split(), of="saved_data")
        | keep("one_to_tensor", split(True), of="alone/whole")
        | keep("folder_to_tensor", split(), of="saved_folder")
        | keep("four_file", split(), 4)
        | keep("four_folder", split(True), 4)
        | keep("four_on", split(True), 4, of="four_folder")
        | keep("file_from_four", split(), of="four_file")
        | keep("folder_from_four", ShardedStrategy(), of="four_folder")
        | {
            "loaded": lambda: loaded(model, where / "loaded", split()),
            "bf16": lambda: run(
                model, where / "bf16", split(), precision="bf16-mixed", **one_update()
            ),
        }
    )


if __name__ == "__main__":
    run_all(scenarios)
