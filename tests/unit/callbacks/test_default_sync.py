"""A run that generates pushes its weights, whether or not it was told to."""

import pytest

from lightning_rl.callbacks import Evaluate, RLCallback, WeightSync, weight_sync
from lightning_rl.models.policy import Policy
from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule
from tests.support.small_run import adamw, data_module, grpo, trainer_of


class Watch(RLCallback):
    """Notes what rollouts were written by, and how far the engine was off."""

    def __init__(self):
        self.synced, self.versions = [], []

    def on_weights_synced(self, trainer, pl_module, version):
        self.synced.append(version)

    def on_collect_end(self, trainer, pl_module, rollouts):
        self.versions.append({v for rollout in rollouts for v in rollout.versions})


def small(**options):
    few = {"group_size": 2, "groups_per_iteration": 2, "iterations_per_epoch": 2}
    return data_module(**few | {"evaluation": {"samples": 1}} | options)


def syncs(trainer):
    return [c for c in trainer.callbacks if isinstance(c, WeightSync)]


def test_a_script_without_one_pushes_before_its_first_rollouts(tiny_model, tmp_path):
    watch, evaluate = Watch(), Evaluate()
    trainer = trainer_of(tmp_path, [evaluate, watch], logger=False)
    data = small()
    trainer.fit(grpo(tiny_model, optimizer=adamw(1e-3)), data)
    [sync] = syncs(trainer)
    assert trainer.callbacks.index(sync) < trainer.callbacks.index(evaluate)
    assert watch.synced == [0, 1, 2]
    assert watch.versions == [{0}, {1}]
    metrics = trainer.callback_metrics
    assert metrics["sync/version"] == 2
    assert metrics["sync/probe_gap"] < 1e-4
    assert metrics["rollout/logprob_gap_max"] < 1e-4  # rollouts are of the trainer's weights
    assert "eval/accuracy" in metrics


@pytest.mark.parametrize("act", ["validate", "test", "predict"])
def test_without_training_too(tiny_model, tmp_path, act):
    trainer, module, data = trainer_of(tmp_path, [], logger=False), grpo(tiny_model), small()
    engine = data.engine
    held = []
    engine.load_weights = lambda weights, version: (
        held.append(dict(weights)),
        type(engine).load_weights(engine, held[-1].items(), version),
    )
    getattr(trainer, act)(module, data)
    [weights] = held
    expected = dict(Policy(str(tiny_model)).named_weights())
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(weight) for name, weight in expected.items())


def test_a_given_one_stays_as_it_is(tiny_model, tmp_path):
    class Own(WeightSync):
        """Somebody's own."""

    watch, given = Watch(), Own(schedule=FixedSchedule(2), probe_prompts=0)
    trainer = trainer_of(tmp_path, [watch, given], logger=False)
    trainer.fit(grpo(tiny_model, optimizer=adamw(1e-3)), small())
    assert syncs(trainer) == [given]
    assert trainer.callbacks.index(watch) < trainer.callbacks.index(given)
    assert watch.synced == [0, 2]
    assert "sync/probe_gap" not in trainer.callback_metrics


class Never(SyncSchedule):
    def should_sync(self, state):
        return False


@pytest.mark.parametrize("schedule", [Never(), FixedSchedule(4)])
def test_an_engine_that_nobody_pushes_to_is_told_of_once(
    tiny_model, tmp_path, monkeypatch, schedule, recwarn
):
    monkeypatch.setattr(weight_sync, "STALE_AFTER", 3)
    data = data_module(
        evaluation=None, group_size=2, groups_per_iteration=2, iterations_per_epoch=6
    )
    trainer = trainer_of(tmp_path, [WeightSync(schedule=schedule)], logger=False)
    trainer.fit(grpo(tiny_model, optimizer=adamw(1e-3)), data)
    told = [str(w.message) for w in recwarn if "has not asked for a push" in str(w.message)]
    assert len(told) == isinstance(schedule, Never)
    assert all("for 3 iterations" in text and "SyncCollector" in text for text in told)
