"""Test vLLM that fails or hangs in the middle of a run: it is told in a line, saved, resumed."""

import re
import threading

import pytest

from lightning_rl.callbacks import IterationCheckpoint, Watchdog, WeightSync
from lightning_rl.engines import TransformersEngine, VLLMLocal
from lightning_rl.errors import EngineError, StalledError
from tests.support.small_run import data_module, grpo, trainer_of

pytestmark = pytest.mark.slow


class Faulty(VLLMLocal):
    """A vLLM whose model does as ``fault`` does from some step on."""

    def __init__(self, healthy: int, fault) -> None:
        super().__init__(max_model_len=32, kv_cache_gb=0.05)
        self.healthy = healthy
        self.fault = fault

    def start(self, model_dir) -> None:
        super().start(model_dir)
        executor = self._llm.engine_core.engine_core.model_executor
        sample = executor.sample_tokens

        def counted(*arguments, **options):
            self.healthy -= 1
            if self.healthy < 0:
                self.fault()
            return sample(*arguments, **options)

        executor.sample_tokens = counted


def fit(tiny_model, tmp_path, engine, timeout_s, ckpt_path=None):
    module = grpo(tiny_model)
    callbacks = [WeightSync(probe_prompts=0), Watchdog(timeout_s), IterationCheckpoint(100)]
    trainer = trainer_of(tmp_path, callbacks, logger=False, enable_checkpointing=True)
    data = data_module(engine=engine, groups_per_iteration=2, group_size=4, iterations_per_epoch=4)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def run_directory(tmp_path):
    return tmp_path / "lightning_rl_runs" / "version_0"


def resume(tiny_model, tmp_path):
    """Go on from the one checkpoint that was left, with an engine that works."""
    (saved,) = (run_directory(tmp_path) / "checkpoints").glob("iteration_*.ckpt")
    assert saved.name != "iteration_4.ckpt"
    engine = TransformersEngine(device="cpu")
    return fit(tiny_model, tmp_path, engine, timeout_s=120, ckpt_path=str(saved))


def test_vllm_that_fails(tiny_model, tmp_path, capfd):
    def fail():
        raise RuntimeError("some kernel\nfailed: device-side assert triggered")

    engine = Faulty(14, fail)  # six tokens a rollout: in the third iteration
    with pytest.raises(EngineError) as raised:
        fit(tiny_model, tmp_path, engine, timeout_s=120)
    message = str(raised.value)
    assert message.startswith("vLLM failed while generating: failed: device-side assert triggered")
    # What vLLM has to say about it is in a file, not on the terminal.
    assert engine._crash_file.read_text().startswith("Dumping input data for V1 LLM engine")
    assert message.endswith(f"(details of the failing step are in {engine._crash_file})")
    printed = capfd.readouterr()
    assert "Dumping" not in printed.out + printed.err
    engine._crash_file.unlink()
    assert resume(tiny_model, tmp_path).iteration == 4


def test_vllm_that_hangs_within_a_step(tiny_model, tmp_path):
    release = threading.Event()
    try:
        with pytest.raises(StalledError, match=r"hangs and blocks the event loop at "
                           r"integration/test_engine_faults.py:\d+ in counted \(called by "
                           r"engines/vllm/local.py:\d+ in _step\)"):  # fmt: skip
            fit(tiny_model, tmp_path, Faulty(14, release.wait), timeout_s=10)
        stacks = (run_directory(tmp_path) / "watchdog_0.txt").read_text()
        assert "in sample_tokens" not in stacks  # it never got there
        assert "Thread lightning_rl:\n" in stacks
        assert re.search(r"\d tasks that await:\n(  .*\n)+  .* in VLLMLocal.generate\n", stacks)
        assert resume(tiny_model, tmp_path).iteration == 4
    finally:
        release.set()
