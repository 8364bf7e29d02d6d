"""What two training processes do in tests/integration/test_ddp_resume.py: save, and go on.

Run as tests/support/ranks_run.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_rl.callbacks import IterationCheckpoint, RLCallback
from lightning_rl.collect.ahead import AsyncCollector
from lightning_rl.errors import LightningRLError
from tests.support.ranks_run import SharedEngine, adamw, failure, fit, replaying, run_all, sharded


def saved(
    model: str, where: Path, strategy: Strategy | str, *extra: Any, **options: Any
) -> dict[str, Any]:
    """A run of two epochs, saved after each of its four iterations."""
    keep = IterationCheckpoint(1, 9)
    options = {"optimizer": adamw} | options
    return fit(model, where, strategy, *extra, keep, iterations=2, epochs=2, **options)


def gone_on(
    model: str, where: Path, strategy: Strategy | str, checkpoint: Path, **options: Any
) -> dict[str, Any]:
    """The rest of such a run."""
    options = {"optimizer": adamw, "ckpt_path": str(checkpoint)} | options
    return fit(model, where, strategy, iterations=2, epochs=2, **options)


def checkpoint_of(where: Path, name: str) -> Path:
    return where / "lightning_logs" / "version_0" / "checkpoints" / name


def kept(
    model: str, where: Path, name: str, strategy: Strategy, processes: int = 2, of: str = ""
) -> dict[str, Callable[[], Any]]:
    """A scenario: a run that leaves checkpoints, or the rest of one ``of`` which has."""
    if not of:
        return {name: partial(saved, model, where / name, strategy, processes=processes)}
    checkpoint = checkpoint_of(where / of, "iteration_2.ckpt")
    go_on = partial(gone_on, model, where / name, strategy, checkpoint, processes=processes)
    return {name: go_on}


def resumed(
    model: str, where: Path, strategy: Callable[[], Strategy], checkpoint: str, **options: Any
) -> dict[str, Any]:
    """A run of two epochs, and one that goes on from one of its checkpoints."""
    whole = saved(model, where / "whole", strategy(), **options)
    path = checkpoint_of(where / "whole", checkpoint)
    return {"whole": whole, "rest": gone_on(model, where / "rest", strategy(), path, **options)}


def eight_bits(parameters: Any) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3)


class StopsWhenCollected(RLCallback):
    """Ends a run whose third batch is collected and graded, and not trained on."""

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        if pl_module.iteration == 2:
            raise LightningRLError("stopped")


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    return {
        "one_to_two": lambda: gone_on(
            model, where / "one_to_two", DDPStrategy(),
            checkpoint_of(where / "alone" / "stopped", "iteration_2.ckpt"),
        ),
        "one_to_shared": lambda: gone_on(
            model, where / "one_to_shared", DDPStrategy(),
            checkpoint_of(where / "alone" / "stopped", "iteration_2.ckpt"),
            data={"engine": SharedEngine()},
        ),
        "one_to_fsdp": lambda: gone_on(
            model, where / "one_to_fsdp", sharded(),
            checkpoint_of(where / "alone" / "stopped", "iteration_2.ckpt"),
        ),
        "replay_saved": lambda: saved(
            model, where / "replay_saved", DDPStrategy(), **replaying(where / "replay_saved")
        ),
        "ahead": lambda: saved(
            model, where / "ahead", DDPStrategy(), data={"collector": AsyncCollector()}
        ),
        "resume_ddp": lambda: resumed(model, where / "resume_ddp", DDPStrategy, "iteration_3.ckpt"),
        "resume_8bit": lambda: resumed(
            model, where / "resume_8bit", DDPStrategy, "iteration_3.ckpt", optimizer=eight_bits
        ),
        "shared_8bit": lambda: failure(
            lambda: fit(model, where / "shared_8bit", sharded(), optimizer=eight_bits)
        ),
        "resume_fsdp": lambda: resumed(model, where / "resume_fsdp", sharded, "iteration_3.ckpt"),
        "resume_shards": lambda: resumed(
            model, where / "resume_shards", lambda: sharded(True), "iteration_2.ckpt"
        ),
    }  # fmt: skip


if __name__ == "__main__":
    run_all(scenarios)
