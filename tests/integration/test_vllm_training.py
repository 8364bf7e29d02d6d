"""Test training on rollouts of a real vLLM engine, its weight sync, and what comes out of it."""

import asyncio
import json
import math

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import AutoModelForCausalLM

from lightning_rl.callbacks import (
    Evaluate,
    HFExport,
    PreviewTable,
    RLCallback,
    RLProgressBar,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.errors import WeightSyncError
from lightning_rl.module import PolicyModule
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import ROUNDING
from tests.support.grouped import grouped
from tests.support.small_run import data_module, numbers, share_of_sevens, trainer_of
from tests.support.tolerances import bfloat16_rounding

# A prompt longer than one cache block of 32 tokens, so that prefixes are really shared.
PREFIX = "0123456789" * 4


def fit(tiny_model, tmp_path, engine, *callbacks, iterations=2, trainer=None, data=None, **module):
    """Fit one epoch of GRPO; return the module and every iteration's metrics."""
    prompts = IterablePrompts([{"prompt": f"{PREFIX}{n}="} for n in range(10, 30)], seed=1)
    module = PolicyModule(
        str(tiny_model),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
        **grouped(seed=7, **module),
    )
    data = data_module(
        train_prompts=prompts,
        engine=engine,
        evaluation=numbers(8),
        iterations_per_epoch=iterations,
        **(data or {}),
    )
    report = RunReport()
    runner = trainer_of(
        tmp_path,
        [*callbacks, report],
        logger=TensorBoardLogger(tmp_path, "run"),
        enable_progress_bar=True,
        **(trainer or {}),
    )
    runner.fit(module, data)
    return module, report.history


def column(history, name: str) -> list[float]:
    return [row[name] for row in history if name in row]


def test_a_model_object_a_list_and_a_function_are_enough(tiny_model, tmp_path):
    """The engine is its own, and built from the copy that was made of the object."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    module = PolicyModule(lm, optimizer=torch.optim.SGD, update={"seed": 7})
    data = RLDataModule(
        [f"{PREFIX}{n}=" for n in range(8)],
        share_of_sevens,
        engine=VLLMLocal(max_model_len=64, kv_cache_gb=0.05),
        sampling={"max_tokens": 6},
        groups_per_iteration=2,
        iterations_per_epoch=1,
    )
    trainer = trainer_of(tmp_path, [WeightSync()], logger=False)
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    assert metrics["sync/probe_gap"] < ROUNDING  # so the engine has the object's weights
    assert metrics["rollout/completed"] == 16
    assert not torch.equal(module.policy.lm.model.norm.weight, lm.model.norm.weight)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory, vllm):
    """Run with every callback; return (run directory, module, metrics)."""
    tmp_path = tmp_path_factory.mktemp("grpo")
    callbacks = [
        WeightSync(), Evaluate(every_n_iterations=5), PreviewTable(), HFExport(), RLProgressBar(),
        StepTimer(),
    ]  # fmt: skip
    module, history = fit(tiny_model, tmp_path, vllm, *callbacks, iterations=10)
    return tmp_path / "run" / "version_0", module, history


def test_the_reward_rises_on_policy(trained):
    directory, _, history = trained
    rewards, accuracy = column(history, "reward/mean"), column(history, "eval/accuracy")
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.3
    assert accuracy[-1] > accuracy[0] + 0.3
    # Ten pushes, and engine and trainer agree after each, on every token trained on.
    assert column(history, "sync/version") == list(range(11))
    assert max(column(history, "sync/probe_gap")) < ROUNDING
    assert max(column(history, "rollout/logprob_gap_max")) < ROUNDING
    assert set(column(history, "rollout/staleness_max")) == {0.0}
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 10)
    assert len((directory / "rollouts.jsonl").read_text().splitlines()) == 80


def test_the_export_is_the_policy_in_transformers_and_in_a_fresh_vllm(trained):
    directory, module, _ = trained
    plain = AutoModelForCausalLM.from_pretrained(directory / "hf")
    for mine, theirs in zip(module.policy.lm.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # No push here: vLLM reads the exported files itself.
    options = {"load_format": "auto", "hf_overrides": {"tie_word_embeddings": True}}
    fresh = VLLMLocal(max_model_len=64, kv_cache_gb=0.05, options=options)
    fresh.start(directory / "hf")
    fresh.version = 0
    prompt, sampling = [3, 4, 2], Sampling(max_tokens=6, min_tokens=6, temperature=0.7)

    async def run():
        return await asyncio.gather(*(fresh.generate(prompt, sampling, s) for s in range(8)))

    for completion in asyncio.run(run()):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, 2:-1].double() / 0.7
        logits[:, 1] = -torch.inf  # min_tokens forbids the end
        expected = logits.log_softmax(-1).gather(-1, ids[0, 3:, None]).squeeze(-1)
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=ROUNDING)
    fresh.close()


class SkipsALayer(MemoryTransport):
    """Sends one layer's old weights from the second push on."""

    def __init__(self, skipped: str) -> None:
        super().__init__()
        self.skipped = skipped
        self.old: torch.Tensor | None = None

    def push(self, weights, version):
        sent = {}
        for name, weight in weights:
            if name == self.skipped:
                self.old = weight.clone() if self.old is None else self.old
                weight = self.old
            sent[name] = weight
        super().push(sent.items(), version)


@pytest.mark.parametrize(
    "skipped", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"]
)
def test_the_probe_finds_a_weight_that_was_not_sent(tiny_model, tmp_path, vllm, skipped):
    sync = WeightSync(transport=SkipsALayer(skipped), digests=False)
    with pytest.raises(
        WeightSyncError, match=r"after the sync of version 1, .* disagree by .* nats; most on token"
    ):
        fit(tiny_model, tmp_path, vllm, sync)
    summary = json.loads((tmp_path / "run" / "version_0" / "summary.json").read_text())
    assert summary["status"] == "failed"


def test_the_probe_finds_a_prefix_cache_that_was_not_reset(monkeypatch, tiny_model, tmp_path, vllm):
    fit(tiny_model, tmp_path / "good", vllm, WeightSync(), iterations=2)
    monkeypatch.setattr(vllm._llm, "reset_prefix_cache", lambda **_: True)
    with pytest.raises(WeightSyncError, match="or a stale cache"):
        fit(tiny_model, tmp_path / "bad", vllm, WeightSync(), iterations=2)


class Rollouts(RLCallback):
    """Records all tokens that were sampled, and the versions that wrote them."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.versions: list[set[int]] = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self.tokens += [r.token_ids for r in rollouts]
        self.versions.append({v for r in rollouts for v in r.versions})


def test_a_slower_schedule_trains_off_policy_and_says_so(tiny_model, tmp_path, vllm):
    from lightning_rl.sync.schedule import FixedSchedule

    seen = Rollouts()
    sync = WeightSync(schedule=FixedSchedule(every_n_iterations=2))
    _, history = fit(tiny_model, tmp_path, vllm, sync, seen, iterations=4, ppo_epochs=2)
    assert seen.versions == [{0}, {0}, {2}, {2}]
    assert column(history, "rollout/staleness_max") == [0, 1, 0, 1]
    gaps = column(history, "rollout/logprob_gap_max")
    assert max(gaps[0], gaps[2]) < ROUNDING
    assert min(gaps[1], gaps[3]) > 1e-3


def test_a_seeded_run_can_be_repeated(tiny_model, tmp_path, vllm):
    runs = []
    for name in ("a", "b"):
        seen = Rollouts()
        fit(tiny_model, tmp_path / name, vllm, WeightSync(), seen)
        runs.append(seen.tokens)
    assert runs[0] == runs[1]


def test_bf16_mixed_stays_close(tiny_model, tmp_path, vllm):
    _, history = fit(
        tiny_model, tmp_path, vllm, WeightSync(max_gap=0.5), iterations=3,
        trainer={"precision": "bf16-mixed"},
    )  # fmt: skip
    assert all(math.isfinite(x) for x in column(history, "policy/loss"))
    gaps = column(history, "rollout/logprob_gap_max")
    assert len(gaps) == 3
    # The engine computes in float32: they differ by bfloat16's rounding, and not by more.
    assert ROUNDING < max(gaps) < bfloat16_rounding(tiny_model, magnitude=4.0)


def test_gradient_checkpointing_changes_nothing(tiny_model, tmp_path, vllm):
    weights = []
    for name, on in (("off", False), ("on", True)):
        module, _ = fit(tiny_model, tmp_path / name, vllm, WeightSync(), gradient_checkpointing=on)
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 1e-5


def test_an_engine_that_sleeps_between_pushes_writes_the_same(tiny_model, tmp_path, vllm):
    """vLLM's CPU build keeps the memory, but goes to sleep and wakes as on a GPU.

    A request that it gets asleep would wait for ever; one with weights given up is refused.
    """
    runs, slept = [], []
    for level in (None, 1, 2):
        seen = Rollouts()
        vllm.sleep_level = level  # which the constructor's setting refuses on CPUs

        class Look(RLCallback):
            def on_update_start(self, trainer, pl_module, batch) -> None:
                slept.append((vllm._llm.is_sleeping(), vllm.version))

        module, _ = fit(tiny_model, tmp_path / str(level), vllm, WeightSync(), seen, Look())
        runs.append((seen.tokens, [p.detach().clone() for p in module.policy.parameters()]))
    vllm.sleep_level = None
    assert slept == [(False, 0), (False, 1), (True, 0), (True, 1), (True, -1), (True, -1)]
    for tokens, weights in runs[1:]:
        assert tokens == runs[0][0]
        assert all(torch.equal(a, b) for a, b in zip(weights, runs[0][1], strict=True))
