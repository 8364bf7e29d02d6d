"""Watchdog: engines that never answer, awaiting or blocking; the run stops and can be resumed."""

import asyncio
import logging
import re
import threading

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.callbacks import IterationCheckpoint, Watchdog, WeightSync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.errors import ConfigError, EngineError, StalledError
from lightning_rl.run.loop.background import run_async, runtime
from lightning_rl.run.loop.stacks import where_tasks_wait
from tests.support.lots import LotEngine
from tests.support.small_run import data_module, grpo, trainer_of
from tests.support.tiers import slow

HEALTHY = 10**9


class Stalling(LotEngine):
    """Answers ``healthy`` requests, then never again."""

    watchdog: Watchdog

    def __init__(self, healthy: int) -> None:
        super().__init__(device="cpu")
        self.healthy = healthy
        self.release = threading.Event()

    def ill(self, requests: int = 1) -> bool:
        self.healthy -= requests
        if self.healthy >= 0:
            return False
        self.watchdog.timeout_s = 1.0  # not before: a busy machine must not look like a hang
        return True


class NeverAnswers(Stalling):
    async def generate(self, token_ids, sampling, seed):
        if self.ill():
            await asyncio.Event().wait()
        return await super().generate(token_ids, sampling, seed)


class BlocksTheLoop(Stalling):
    def _step(self, decoder):
        if self.ill(len(self._waiting)):
            self.release.wait()
        return super()._step(decoder)


class Raises(Stalling):
    def _step(self, decoder):
        if self.ill(len(self._waiting)):
            raise RuntimeError("the device fell off the bus")
        return super()._step(decoder)


def fit(tiny_model, tmp_path, engine, ckpt_path=None, **data):
    module = grpo(tiny_model)
    engine.watchdog = Watchdog(8.0)
    trainer = trainer_of(
        tmp_path,
        [WeightSync(probe_prompts=0), engine.watchdog, IterationCheckpoint(100)],
        logger=CSVLogger(tmp_path, "csv"),
        enable_checkpointing=True,
    )
    options = {"groups_per_iteration": 2, "group_size": 4, "iterations_per_epoch": 3} | data
    trainer.fit(module, data_module(engine=engine, **options), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """Return the weights that an undisturbed run ends with."""
    module = fit(tiny_model, tmp_path_factory.mktemp("whole"), Stalling(HEALTHY))
    return {name: weight.clone() for name, weight in module.policy.named_weights()}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (NeverAnswers, StalledError, r"timeout_s=1 seconds: generation hangs and waits at "
         r".*test_watchdog.py:\d+ in NeverAnswers.generate \(called by agents/base.py:\d+ in "
         r"completion_of\); all stacks are in .*_0.txt. If a"),
        slow(BlocksTheLoop, StalledError, r"hangs and blocks the event loop at .*test_watchdog.py:"
         r"\d+ in _step \(called by engines/hf/engine.py:\d+ in _advance\)"),
        slow(Raises, EngineError, "failed while generating: the device fell off the bus"),
    ],
)  # fmt: skip
def test_the_run_stops_is_saved_and_ends_as_if_nothing_had_been(
    tiny_model, tmp_path, whole, kind, error, message
):
    engine = kind(2 * 4 + 3)  # in the middle of the second iteration
    try:
        with pytest.raises(error, match=message):
            fit(tiny_model, tmp_path, engine)
    finally:
        engine.release.set()
    (saved,) = (tmp_path / "csv" / "version_0" / "checkpoints").glob("iteration_*.ckpt")
    assert saved.name == "iteration_1.ckpt"
    module = fit(tiny_model, tmp_path, Stalling(HEALTHY), ckpt_path=str(saved))
    assert module.iteration == 3
    for name, weight in module.policy.named_weights():
        assert torch.equal(weight, whole[name]), name


@pytest.mark.slow
def test_a_step_that_hangs_in_the_main_thread_is_told_and_stops_the_run(
    tiny_model, tmp_path, monkeypatch, caplog
):
    """The engine has several threads, and so computes in the thread that trains."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    engine = BlocksTheLoop(2 * 4 + 3)

    class Helps(logging.Handler):
        def emit(self, record):
            engine.release.set()

    logger, helper = logging.getLogger("lightning_rl.callbacks.watchdog"), Helps()
    logger.addHandler(helper)
    message = r"hangs in the main thread at .*test_watchdog.py:\d+ in _step"
    try:
        with pytest.raises(StalledError, match=message):
            fit(tiny_model, tmp_path, engine)
    finally:
        engine.release.set()
        logger.removeHandler(helper)
    assert re.search(message, caplog.text)
    assert (tmp_path / "csv" / "version_0" / "checkpoints" / "iteration_1.ckpt").exists()


def test_the_stacks_are_written_down(tiny_model, tmp_path):
    engine = NeverAnswers(8)
    with pytest.raises(StalledError):
        fit(tiny_model, tmp_path, engine)
    text = (tmp_path / "csv" / "version_0" / "watchdog_0.txt").read_text()
    assert "Thread MainThread:\n" in text
    assert "in run_async" in text
    assert "Thread lightning_rl:\n" in text
    # Eight rollouts wait alike; the chain goes down to who does not answer.
    block = text[text.index("8 tasks that await:") :].split("\n\n")[0]
    assert "collect/pipeline.py" in block
    assert block.splitlines()[-2].endswith("in NeverAnswers.generate")
    assert block.splitlines()[-1].endswith("in Event.wait")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NeverAnswers, BlocksTheLoop])
def test_what_is_prefetched_is_given_up_too(tiny_model, tmp_path, kind):
    engine = kind(8)
    try:
        with pytest.raises(StalledError):
            fit(tiny_model, tmp_path, engine, collector=AsyncCollector(max_staleness=1))
    finally:
        engine.release.set()
    (saved,) = (tmp_path / "csv" / "version_0" / "checkpoints").glob("iteration_*.ckpt")
    module = fit(tiny_model, tmp_path, Stalling(HEALTHY), ckpt_path=str(saved),
                 collector=AsyncCollector(max_staleness=1))  # fmt: skip
    assert module.iteration == 3


@pytest.mark.slow
def test_progress_and_other_waits_are_left_alone(tiny_model, tmp_path):
    class Slow(Stalling):
        """Takes longer than the timeout for all, but not for one."""

        async def generate(self, token_ids, sampling, seed):
            self.watchdog.timeout_s = 1.5
            await asyncio.sleep(0.2)
            return await super().generate(token_ids, sampling, seed)

    one_by_one = SyncCollector(max_concurrency=1)
    module = fit(tiny_model, tmp_path, Slow(HEALTHY), collector=one_by_one, iterations_per_epoch=1)
    assert module.iteration == 1
    assert runtime.stalled_seconds() == 0.0


@pytest.mark.slow
def test_a_wait_that_is_over_is_not_abandoned():
    runtime.abandon_wait(StalledError("too late"))

    async def one() -> int:
        return 1

    assert run_async(one()) == 1


@pytest.mark.slow
def test_a_new_loop_takes_over():
    old = runtime.loop
    runtime.abandon_loop()
    assert runtime.loop is not old

    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert run_async(here()) is runtime.loop
    assert where_tasks_wait(old) == "no task (there is none)"
    old.call_soon_threadsafe(old.stop)


def test_a_timeout_must_be_positive():
    with pytest.raises(ConfigError, match="timeout_s=0 must be > 0 seconds"):
        Watchdog(0)
