"""Test asynchronous training on real vLLM: versions that are true, resuming, failing, Ctrl-C.

Slow: runs are ended, resumed and run as a whole beside that.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from benchmarks.support import forked
from lightning_rl.agents.base import Agent, append_given, generate_turn
from lightning_rl.callbacks import (
    Evaluate,
    PreviewTable,
    RLCallback,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.partial import PartialCollector
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling
from lightning_rl.errors import EngineError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import RolloutStatus
from tests.support.engine_checks import same_draws
from tests.support.small_run import StopAfter, numbers, trainer_of

ROOT = Path(__file__).parents[2]


class SlowTurns(Agent):
    """Takes three turns of six tokens, and between them a tool that takes its time, by the seed."""

    async def run(self, rollout, engine, sampling):
        latency = random.Random(rollout.seed)
        for turn in range(3):
            await generate_turn(rollout, engine, sampling, max_tokens=6)
            if turn < 2:
                await asyncio.sleep(min(1.0, 0.02 * latency.paretovariate(1.0)))
                append_given(rollout, [2, 5])
        rollout.finish_reason = "stop"
        rollout.status = RolloutStatus.COMPLETED
        return rollout


def sevens(completions, **columns):
    return [text.count("7") / 22 for text in completions]


class Watch(RLCallback):
    """Weights of every version, and the rollouts of every batch that was trained on."""

    def __init__(self) -> None:
        self.weights = {}
        self.batches = {}
        self._collected = []

    def on_weights_synced(self, trainer, pl_module, version) -> None:
        self.weights[version] = {k: v.clone() for k, v in pl_module.policy.state_dict().items()}

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self._collected = list(rollouts)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches[pl_module.iteration - 1] = self._collected


class FirstNeverEnds(SlowTurns):
    """The first group of all asks its engine again and again."""

    first = prompt = None

    async def run(self, rollout, engine, sampling):
        if self.first is None:
            self.first, self.prompt = rollout.group_id, rollout.prompt.id
        while rollout.group_id == self.first:
            await engine.generate([3], Sampling(max_tokens=60, min_tokens=60), rollout.seed)
        return await super().run(rollout, engine, sampling)


def fit(tiny_model, tmp_path, engine, collector, *callbacks, epochs=1, agent=None, **options):
    module = PolicyModule(
        str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), update={"seed": 7}
    )
    data = RLDataModule(
        numbers(100, 300, seed=1),
        [sevens],
        engine=engine,
        agent=agent or SlowTurns(),
        collector=collector,
        evaluation=numbers(8),
        sampling=Sampling(max_tokens=22),
        group_size=4,
        groups_per_iteration=4,
        iterations_per_epoch=5,
        seed=7,
    )
    report = RunReport()
    trainer = trainer_of(
        tmp_path,
        [WeightSync(), *callbacks, report],
        max_epochs=epochs,
        logger=CSVLogger(tmp_path, "run"),
    )
    trainer.fit(module, data, **options)
    return module, data, report.history


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory, vllm):
    """Train ten iterations with every callback."""
    tmp_path, watch = tmp_path_factory.mktemp("async"), Watch()
    callbacks = [Evaluate(every_n_iterations=4), PreviewTable(num_rollouts=3), StepTimer(), watch]
    module, _, history = fit(
        tiny_model, tmp_path, vllm, AsyncCollector(2), *callbacks, epochs=2
    )  # fmt: skip
    return tmp_path / "run" / "version_0", module, history, watch


def test_every_token_was_written_by_the_version_it_names(trained):
    _, module, _, watch = trained
    rollouts = [r for batch in watch.batches.values() for r in batch]
    spanning = [r for r in rollouts if len({v for v in r.versions if v >= 0}) > 1]
    assert len(spanning) > 10  # pushes found rollouts in flight, or else this tests little
    batch = pack_rollouts(rollouts)
    versions = batch["tokens", "versions"]
    assert torch.equal(versions >= 0, batch["tokens", "loss_mask"])
    wrong = torch.zeros(len(versions))
    for version, weights in watch.weights.items():
        module.policy.load_state_dict(weights)
        with torch.no_grad():
            scored = module.policy.score(batch, "again", 4096)["tokens"]
        gap = (scored["again"] - scored["rollout_logprobs"]).abs()
        wrong = torch.where(versions == version, gap, wrong)
    # Within the engine's tolerance, where other weights' logprobs are off by tenths.
    assert float(wrong.max()) < 1e-3


def test_staleness_is_bounded_counted_and_logged(trained):
    _, _, history, watch = trained
    for iteration, rollouts in watch.batches.items():
        ages = [iteration - v for r in rollouts for v in r.versions if v >= 0]
        assert 0 <= min(ages) <= max(ages) <= 2
        row = history[iteration + 1]
        assert row["rollout/staleness_max"] == max(ages)
        assert row["rollout/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
    rows = history[1:]
    assert max(row["rollout/staleness_max"] for row in rows) == 2
    assert {row["rollout/completed"] for row in rows} == {16.0}
    for name in ("init", "aborted", "failed", "archived", "expired", "skipped"):
        assert {row[f"rollout/{name}"] for row in rows} == {0.0}
    # Two batches more than the one it trains on, while the run lasts; none at its end.
    work = [row["collect/in_flight"] + row["collect/waiting"] for row in rows]
    assert max(work) <= 8
    assert work[-1] == 0
    assert work[3] > 0


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_group_that_became_too_stale_is_aborted_in_the_engine(
    tiny_model, tmp_path, name, request
):
    engine, watch, agent = request.getfixturevalue(name), Watch(), FirstNeverEnds()
    _, _, history = fit(
        tiny_model, tmp_path, engine, AsyncCollector(1, abort_stale=True), watch, agent=agent
    )
    assert engine.in_flight == 0
    rows = history[1:]
    assert sum(row["rollout/expired"] for row in rows) >= 4
    assert max(row["rollout/wasted_by_aborts"] for row in rows) > 0
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    # Its prompt was drawn once more, and trained on.
    trained = [r for rollouts in watch.batches.values() for r in rollouts]
    assert agent.first not in {r.group_id for r in trained}
    assert agent.prompt in {r.prompt.id for r in trained}
    assert len({r.prompt.id for r in trained}) == 20


def test_a_streamed_batch_is_the_whole_batch_on_policy(tiny_model, tmp_path, vllm):
    streamed, whole = Watch(), Watch()
    _, _, history = fit(tiny_model, tmp_path / "a", vllm, StreamedCollector(2), streamed)
    fit(tiny_model, tmp_path / "b", vllm, SyncCollector(), whole)
    for iteration, rollouts in streamed.batches.items():
        assert {v for r in rollouts for v in r.versions if v >= 0} == {iteration}
        assert history[iteration + 1]["policy/streamed_share"] > 0
        told = [(r.id, r.seed) for r in rollouts]
        assert told == [(r.id, r.seed) for r in whole.batches[iteration]]
    # Later ones are of weights that differ in their last bits, which Adam makes more of.
    assert same_draws(streamed.batches[0], whole.batches[0])


def test_callbacks_do_their_part(trained):
    directory, module, history, _ = trained
    assert module.iteration == 10
    assert [row["iteration"] for row in history if "eval/accuracy" in row] == [0, 4, 8, 10]
    lines = (directory / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [
        i for i in range(1, 11) for _ in "abc"
    ]
    assert json.loads((directory / "summary.json").read_text())["status"] == "completed"
    rewards = [row["reward/mean"] for row in history if "reward/mean" in row]
    assert sum(rewards[-3:]) > sum(rewards[:3])  # learning goes on, off policy
    assert max(row["sync/probe_gap"] for row in history if "sync/probe_gap" in row) < 1e-3


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: AsyncCollector(2), id="async"),
        pytest.param(OneStepOffCollector, id="one_step_off", marks=pytest.mark.slow),
        pytest.param(PartialCollector, id="partial", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_loses_and_doubles_no_prompt(tiny_model, tmp_path, vllm, make):
    path, first, then = tmp_path / "cut.ckpt", Watch(), Watch()
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tiny_model, tmp_path / "a", vllm, make(), first, StopAfter(3, path), epochs=2)
    collector = make()
    _, data, _ = fit(tiny_model, tmp_path / "b", vllm, collector, then, epochs=2, ckpt_path=path)
    assert sorted(first.batches) == [0, 1, 2]
    assert sorted(then.batches) == [3, 4, 5, 6, 7, 8, 9]
    trained = [
        r.prompt.prompt
        for watch in (first, then)
        for batch in watch.batches.values()
        for r in batch[::4]
    ]
    assert len(set(trained)) == len(trained) == 40
    waiting = [group[0]["prompt"]["prompt"] for group in collector.state_dict()["groups"]]
    drawn = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 300)], seed=1)
    drawn.load(data._tokenizer)
    everything = sorted(trained + waiting)
    assert everything == sorted(p.prompt for p in drawn.draw(len(everything)))
    for watch in (first, then):
        for iteration, batch in watch.batches.items():
            ages = [iteration - v for r in batch for v in r.versions if v >= 0]
            assert 0 <= min(ages) <= max(ages) <= collector.max_staleness


def test_an_engine_that_fails_in_the_background_is_named(monkeypatch, tiny_model, tmp_path, vllm):
    class Breaks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if pl_module.iteration == 1:
                monkeypatch.setattr(vllm._llm, "step", self.step)

        def step(self):
            raise RuntimeError("no more memory")

    with pytest.raises(EngineError, match="vLLM failed while generating: no more memory"):
        fit(tiny_model, tmp_path, vllm, AsyncCollector(2), Breaks())
    monkeypatch.undo()
    for request in list(vllm._llm.output_processor.request_states):
        vllm._llm.abort_request([request], internal=True)


# ---------------------------------------------------------------- the command, in its own process


def write_config(tiny_model, tmp_path, reward: str, engine: dict) -> Path:
    (tmp_path / "slow_rewards.py").write_text(
        "import asyncio\n\n\n"
        "async def slow(completions, **columns):\n"
        "    await asyncio.sleep(0.2)\n"
        "    return [float(len(text)) for text in completions]\n\n\n"
        "calls = 0\n\n\n"
        "async def breaks(completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 10:\n"
        "        raise ValueError('the judge is gone')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}="}) + "\n" for n in range(100, 300))
    )
    config = {
        "seed_everything": 0,
        "model": {"class_path": "PolicyModule", "init_args": {"model": str(tiny_model)}},
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": {
                    "class_path": "JSONLPrompts",
                    "init_args": {"path": "train.jsonl"},
                },
                "rewards": [f"slow_rewards.{reward}"],
                "engine": engine,
                "collector": {"class_path": "AsyncCollector", "init_args": {"max_staleness": 2}},
                "sampling": {"max_tokens": 10},
                "group_size": 4,
                "groups_per_iteration": 4,
                "iterations_per_epoch": 100_000,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_model_summary": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "run"}},
            "callbacks": [{"class_path": "WeightSync"}, {"class_path": "RunReport"}],
        },
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(tiny_model, tmp_path) -> subprocess.Popen:
    engine = {"class_path": "VLLMLocal", "init_args": {"max_model_len": 32}}
    write_config(tiny_model, tmp_path, "slow", engine)
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_rl", "fit", "--config", "config.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> tuple[str, str]:
    """Return its output; a run that hangs is killed, and fails the test."""
    try:
        return process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


@pytest.mark.slow
def test_a_reward_that_breaks_ends_the_command_by_name(tiny_model, tmp_path):
    write_config(tiny_model, tmp_path, "breaks", {"class_path": "TransformersEngine"})
    said = tmp_path / "said.txt"
    arguments = ["fit", "--config", "config.yaml"]
    assert forked.run("lightning_rl", arguments, said, folder=tmp_path) == 1
    errors = said.read_text()
    assert "lightning-rl: reward error: " in errors
    assert "reward breaks: ValueError: the judge is gone" in errors
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "logs/run/version_0/summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["iterations"] >= 1


@pytest.mark.slow
def test_ctrl_c_ends_the_command(tiny_model, tmp_path):
    process = start(tiny_model, tmp_path)
    rows = tmp_path / "logs/run/version_0/metrics.jsonl"
    for _ in range(900):
        if rows.exists() and len(rows.read_text().splitlines()) > 3:
            break
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = end(process)
    assert process.returncode > 0  # not killed by the signal, but ended
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "logs/run/version_0/summary.json").read_text())
    assert summary["status"] != "completed"
    assert summary["iterations"] >= 3
