"""What the processes of tests/integration/test_tensor.py do: they have matrices together.

Run as tests/support/ranks_run.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_rl.callbacks import HFExport
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.sharding import ShardedStrategy
from tests.support.ranks_resume import checkpoint_of, gone_on, saved
from tests.support.ranks_run import critic, fit, in_minibatches, run_all, sharded
from tests.support.ranks_sharded import separate

OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda model: in_minibatches(),
    "recomputed": lambda model: {"gradient_checkpointing": True},
    "lora": lambda model: {"lora": LoRA(rank=4)},
    "critic": lambda model: critic() | {"value_head": SharedValueHead(), "max_grad_norm": 0.1},
    "separate": separate,
}
"""Of runs that are compared with those of one process."""


def split(folder: bool = False, sequence: int = 1) -> ShardedStrategy:
    """Two processes have matrices together; checkpoints are a file each, or a folder."""
    return ShardedStrategy(sequence=sequence, tensor=2, save_distributed_checkpoint=folder)


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    def of(name: str) -> Callable[[], Any]:
        export = HFExport(merge_adapters=True)
        return lambda: fit(model, where / name, split(), export, **OPTIONS[name](model))

    def rest(name: str, strategy: ShardedStrategy, of: str) -> Callable[[], Any]:
        return lambda: gone_on(
            model, where / name, strategy, checkpoint_of(where / of, "iteration_2.ckpt")
        )

    return {name: of(name) for name in OPTIONS} | {
        "four": lambda: fit(
            model, where / "four", split(), HFExport(), processes=4, **OPTIONS["critic"](model)
        ),
        "four_both": lambda: fit(
            model, where / "four_both", split(sequence=2), HFExport(), processes=4,
            **OPTIONS["critic"](model),
        ),
        "saved_file": lambda: saved(model, where / "saved_file", split()),
        "saved_folder": lambda: saved(model, where / "saved_folder", split(folder=True)),
        "saved_data": lambda: saved(model, where / "saved_data", sharded(True)),
        "file_to_data": rest("file_to_data", ShardedStrategy(), "saved_file"),
        "folder_to_data": rest("folder_to_data", ShardedStrategy(), "saved_folder"),
        "data_to_tensor": rest("data_to_tensor", split(), "saved_data"),
        "one_to_tensor": rest("one_to_tensor", split(folder=True), "alone/whole"),
        "folder_to_tensor": rest("folder_to_tensor", split(), "saved_folder"),
    }  # fmt: skip


if __name__ == "__main__":
    run_all(scenarios)
