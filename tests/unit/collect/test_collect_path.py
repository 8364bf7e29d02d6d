"""Test the way from the loader to the first token: seven files, as whoever reads it meets them."""

import asyncio
import sys
import threading
from pathlib import Path

import lightning_rl
from lightning_rl.callbacks import WeightSync
from lightning_rl.engines import TransformersEngine
from tests.support.small_run import data_module, grpo, trainer_of

LIBRARY = Path(lightning_rl.__file__).parent


class Watched(TransformersEngine):
    """Notes the files of all that waits for the first token of a batch, from the loader on."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.files: list[str] = []

    async def generate(self, token_ids, sampling, seed):
        waiting = frames_of(sys._current_frames()[threading.main_thread().ident])
        if not self.files and any("RolloutLoader" in name for _, name in waiting):
            chains = [awaited(task) for task in asyncio.all_tasks()]
            [outer] = [c for c in chains if any(name.endswith(".take") for _, name in c)]
            frames = [*up_to_the_wait(waiting), *outer, *frames_of(sys._getframe())]
            paths = (Path(file).resolve() for file, _ in frames)
            ours = [str(p.relative_to(LIBRARY)) for p in paths if p.is_relative_to(LIBRARY)]
            self.files = list(dict.fromkeys([*ours, "engines/hf/engine.py"]))
        return await super().generate(token_ids, sampling, seed)


def frames_of(frame) -> list[tuple[str, str]]:
    """Return file and name of each that led to a frame, outermost first."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    return frames[::-1]


def up_to_the_wait(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out what the wait itself is doing just now: it may sleep, or not have begun to."""
    names = [name for _, name in frames]
    return frames[: names.index("Runtime.run_async") + 1]


def awaited(task) -> list[tuple[str, str]]:
    """Return file and name of a task's coroutine, and of each that it waits for in turn."""
    coroutine, frames = task.get_coro(), []
    while hasattr(coroutine, "cr_code"):
        frames.append((coroutine.cr_code.co_filename, coroutine.cr_code.co_qualname))
        coroutine = coroutine.cr_await
    return frames


def test_the_first_token_is_eight_files_from_the_loader(tiny_model, tmp_path):
    engine = Watched()
    trainer = trainer_of(tmp_path, [WeightSync()], fast_dev_run=1, logger=False)
    trainer.fit(grpo(tiny_model), datamodule=data_module(engine=engine))
    assert engine.files == [
        "collect/loader.py",
        "datamodule.py",
        "collect/collection.py",
        "run/loop/background.py",
        "collect/collector.py",
        "collect/pipeline.py",
        "agents/base.py",
        "engines/hf/engine.py",
    ]
