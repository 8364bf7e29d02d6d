"""Test runs whose engine works while the trainer does: resumed, repeated, greedy, and failing."""

import asyncio
import json
import threading

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl.callbacks import RLCallback, RunReport, WeightSync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.partial import (
    PartialCollector,
)
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.engines.base import RunState
from lightning_rl.errors import EngineError, RewardError
from lightning_rl.module import PolicyModule
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule
from tests.support import small_run
from tests.support.small_run import StopAfter, numbers, trainer_of


def sevens(completions, **columns):
    return [text.count("7") / 6 for text in completions]


class Trained(RLCallback):
    """Records which prompts were trained on, and how stale their tokens were."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.ages: list[int] = []
        self.rollouts = []
        self._collected = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self._collected = list(rollouts)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.prompts += [r.prompt.prompt for r in self._collected[::2]]
        self.ages += [pl_module.iteration - 1 - v for r in self._collected for v in r.versions]
        self.rollouts += self._collected


def data_module(collector, **options) -> RLDataModule:
    options = {
        "train_prompts": numbers(100, 180, seed=1),
        "evaluation": None,
        "rewards": [sevens],
        "group_size": 2,
        "groups_per_iteration": 3,
        "iterations_per_epoch": 4,
    } | options
    return small_run.data_module(collector=collector, **options)


def make_module(tiny_model) -> PolicyModule:
    return PolicyModule(
        str(tiny_model), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), update={"seed": 7}
    )


def make_trainer(tmp_path, *callbacks, **options) -> Trainer:
    return trainer_of(tmp_path, [WeightSync(), *callbacks], **options)


def test_a_second_fit_goes_on_working_ahead(tiny_model, tmp_path):
    module, collector, seen = make_module(tiny_model), AsyncCollector(1), Trained()
    for name in ("a", "b"):
        make_trainer(tmp_path / name, seen).fit(module, data_module(collector))
    assert module.iteration == 8
    # The last batch of each run was the only one with nothing behind it.
    assert set(seen.ages) == {0, 1}


def test_rollouts_without_training_need_no_newer_weights(tiny_model, tmp_path):
    trainer = make_trainer(tmp_path)
    batches = trainer.predict(make_module(tiny_model), data_module(AsyncCollector(1)))
    assert [len(batch) for batch in batches] == [6] * 4


@pytest.mark.slow
@pytest.mark.parametrize("make", [SyncCollector, lambda: AsyncCollector(2)])
def test_greedy_collection(tiny_model, tmp_path, make):
    seen = Trained()
    data = data_module(make(), sampling=Sampling(max_tokens=6, temperature=0))
    make_trainer(tmp_path).predict(make_module(tiny_model), data)
    report = RunReport()
    module = make_module(tiny_model)
    make_trainer(tmp_path, seen, report).fit(
        module, data_module(make(), sampling=Sampling(max_tokens=6, temperature=0))
    )
    pairs = zip(seen.rollouts[::2], seen.rollouts[1::2], strict=True)
    # Two rollouts of one version are the same; a push in between may tell them apart.
    alike = [a.token_ids == b.token_ids for a, b in pairs if a.versions == b.versions]
    assert len(alike) >= 8
    assert alike.count(False) <= 1  # where the two likeliest tokens are next to equal
    assert all(torch.isfinite(p).all() for p in module.parameters())


class FailsAfter(TransformersEngine):
    """Breaks in the background, while the second batch is made ahead."""

    left = 8

    async def generate(self, token_ids, sampling, seed):
        self.left -= sampling.max_tokens == 6  # the probe's are shorter
        if self.left < 0:
            raise EngineError("device lost")
        return await super().generate(token_ids, sampling, seed)


def nothing_runs(collector) -> bool:
    async def look():
        return not collector._running

    return run_async(look())


@pytest.mark.parametrize("make", [lambda: AsyncCollector(1), OneStepOffCollector, PartialCollector])
def test_an_engine_that_breaks_in_the_background_ends_the_run_by_name(tiny_model, tmp_path, make):
    collector, report = make(), RunReport()
    data = data_module(collector, engine=FailsAfter(device="cpu"))
    with pytest.raises(EngineError, match="device lost"):
        make_trainer(tmp_path, report).fit(make_module(tiny_model), data)
    assert nothing_runs(collector)
    summary = json.loads((tmp_path / "csv" / "version_0" / "summary.json").read_text())
    assert summary["error"] == "EngineError: device lost"


def test_a_reward_that_breaks_in_the_background_ends_the_run_by_name(tiny_model, tmp_path):
    def breaks(completions, **columns):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no such answer")
        return [0.0] * len(completions)

    collector = AsyncCollector(1)
    with pytest.raises(RewardError, match="reward breaks: ValueError: no such answer"):
        make_trainer(tmp_path).fit(
            make_module(tiny_model), data_module(collector, rewards=[breaks])
        )
    assert nothing_runs(collector)


@pytest.mark.slow
def test_nothing_goes_on_in_the_background_of_a_failed_run(tiny_model, tmp_path):
    collector = AsyncCollector(3)
    with pytest.raises(RuntimeError, match="power cut"):
        make_trainer(tmp_path, StopAfter(1)).fit(make_module(tiny_model), data_module(collector))
    assert nothing_runs(collector)
    assert collector.state_dict()["groups"]


def test_a_blocked_loop_does_not_keep_a_failed_run_from_ending(monkeypatch, tiny_model, tmp_path):
    released = threading.Event()

    class Blocks(AsyncCollector):
        async def close(self) -> None:
            released.wait(60)  # as an agent that computes instead of awaiting
            await super().close()

    monkeypatch.setattr("lightning_rl.datamodule.STOP_SECONDS", 0.1)
    trainer = make_trainer(tmp_path, StopAfter(1))
    with (
        pytest.raises(RuntimeError, match="power cut"),
        pytest.warns(UserWarning, match="could not be stopped, because a reward or agent blocks"),
    ):
        trainer.fit(make_module(tiny_model), data_module(Blocks(1)))
    released.set()


class WhileItWaits(SyncSchedule):
    """Pushes only where the trainer waits for its next batch."""

    least_updates = 1

    def __init__(self) -> None:
        self.seen = []

    def should_sync(self, state):
        self.seen.append((state.trainer, state.updates, state.kl()))
        return state.trainer is RunState.WAITING


def test_a_schedule_is_asked_while_the_trainer_waits(tiny_model, tmp_path):
    """Weights are pushed in the middle of collecting, and what is written from then on has them."""
    order = []

    class Noted(RLCallback):
        def on_collect_start(self, trainer, pl_module):
            order.append("collects")

        def on_weights_synced(self, trainer, pl_module, version):
            order.append(version)

        def on_collect_end(self, trainer, pl_module, rollouts):
            order.append("has them")

    async def slow(completions, **columns):
        await asyncio.sleep(0.5)
        return sevens(completions)

    schedule, trained = WhileItWaits(), Trained()
    trainer = make_trainer(tmp_path, Noted(), trained)
    trainer.callbacks[0].schedule = schedule
    collector = AsyncCollector(max_staleness=2, max_groups_in_flight=1)
    trainer.fit(make_module(tiny_model), datamodule=data_module(collector, rewards=[slow]))
    expected = [0, "collects", "has them"]
    for version in (1, 2, 3):
        expected += ["collects", version, "has them"]
    assert order == expected
    assert trainer.callback_metrics["sync/version"] == 3
    assert 0 <= max(trained.ages) <= 2
    # It is asked at an iteration's end, then where the trainer waits, until it says yes.
    states = [state for state, _, _ in schedule.seen]
    assert states == 3 * [RunState.RUNNING, RunState.WAITING] + [RunState.RUNNING]
    kls = [kl for _, _, kl in schedule.seen]
    assert all(kl > 0 for kl in kls)
    assert kls[:6:2] == kls[1:6:2]  # measured once
    assert all(updates == 1 for _, updates, _ in schedule.seen)


class Watching(FixedSchedule):
    """Pushes every time, and remembers what it saw."""

    def should_sync(self, state):
        seen.append(state)
        return super().should_sync(state)


seen = []


def test_a_schedule_sees_who_is_doing_what(tiny_model, tmp_path):
    seen.clear()
    states = []

    def asks(completions, **columns):
        states.append(datamodule.sync_state(0).trainer)
        return sevens(completions)

    datamodule = data_module(AsyncCollector(1), rewards=[asks])
    trainer = make_trainer(tmp_path)
    trainer.callbacks[0].schedule = Watching()
    trainer.fit(make_module(tiny_model), datamodule=datamodule)
    assert [state.trainer_version for state in seen] == [1, 2, 3, 4]
    assert {state.trainer for state in seen} == {RunState.RUNNING}
    # It works at the next batch, or has it already and waits for weights to begin another.
    for state in seen:
        works = state.collector.in_flight > 0 or state.collector.may_issue
        assert state.collector.state is (RunState.RUNNING if works else RunState.WAITING)
    for state in seen:
        [replica] = state.replicas
        assert (replica.name, replica.state) == ("TransformersEngine", RunState.RUNNING)
        assert replica.version == state.engine_version == state.trainer_version - 1
    # The first batch is awaited; later ones are graded while the trainer works.
    assert RunState.WAITING in states
    after = datamodule.sync_state(4)
    assert (after.trainer, after.collector.state) == (RunState.STOPPED, RunState.STOPPED)
    assert [replica.state for replica in after.replicas] == [RunState.STOPPED]


class ByKL(SyncSchedule):
    """Pushes at once as soon as the policy has moved at all; notes how far."""

    least_updates = 1

    def __init__(self) -> None:
        self.seen = []

    def should_sync(self, state):
        if state.trainer is RunState.RUNNING:
            self.seen.append(state.kl())
        return state.kl() > 1e-9


@pytest.mark.parametrize("make", [lambda: AsyncCollector(2), OneStepOffCollector, PartialCollector])
def test_a_schedule_by_kl_knows_it_after_each_iteration(tiny_model, tmp_path, make):
    """The KL is known after a push, too, while earlier batches come; so it is in the files."""
    schedule, report = ByKL(), RunReport()
    trainer = trainer_of(tmp_path, [WeightSync(schedule=schedule), report])
    trainer.fit(make_module(tiny_model), data_module(make(), iterations_per_epoch=5))
    assert len(schedule.seen) == 5
    # Where no reward differs from the others, nothing moves.
    assert all(0.0 <= kl < 1.0 for kl in schedule.seen), schedule.seen
    assert sum(kl > 1e-9 for kl in schedule.seen) >= 3
    text = (tmp_path / "csv" / "version_0" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["sync/kl"] for row in rows[1:]] == schedule.seen
    assert None not in {value for row in rows for value in row.values()}
