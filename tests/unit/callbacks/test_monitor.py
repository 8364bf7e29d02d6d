"""Test what is refused by name: metrics that nobody records, and syncs too seldom or twice."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl.callbacks import IterationCheckpoint, WeightSync
from lightning_rl.callbacks.early_stopping import Monitor
from lightning_rl.collect.checks import check_sync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.errors import ConfigError
from lightning_rl.sync.schedule import CollectorSchedule, FixedSchedule, TrainerSchedule
from tests.support.small_run import data_module, grpo, trainer_of

BEFORE = ["sync/version", "eval/accuracy", "eval/reward_mean"]
AFTER = ["sync/version", "policy/loss", "policy/entropy", "reward/mean"]


def test_an_evaluations_metric_is_judged_by_the_first_evaluation():
    with pytest.raises(ConfigError) as refused:
        Monitor("eval/acuracy", "IterationCheckpoint").look(BEFORE, evaluates=True)
    assert str(refused.value) == (
        "IterationCheckpoint(monitor='eval/acuracy'): no such metric was recorded; did you mean "
        "eval/accuracy? The recorded metrics are eval/accuracy, eval/reward_mean. A callback that "
        "records it later has to record nan until then"
    )
    late = Monitor("eval/acuracy", "IterationCheckpoint")
    late.look(AFTER, evaluates=True)  # Evaluate(before_training=False)
    with pytest.raises(ConfigError, match="did you mean eval/accuracy"):
        late.look(BEFORE, evaluates=True)


def test_any_other_is_judged_by_the_first_update():
    monitor = Monitor("zeal", "IterationCheckpoint")
    monitor.look(BEFORE, evaluates=True)
    monitor.look(["reward/mean"], evaluates=True)  # a guard left the update out
    with pytest.raises(
        ConfigError, match=r"recorded; The recorded metrics are eval/accuracy, .*sync/version\. A"
    ):
        monitor.look(AFTER, evaluates=True)
    with pytest.raises(
        ConfigError, match="The recorded metrics are policy/entropy, policy/loss, reward/mean, sy"
    ):
        Monitor("eval/accuracy", "IterationCheckpoint").look(AFTER, evaluates=False)


def test_what_was_recorded_once_is_good():
    for name in ("eval/accuracy", "reward/mean"):
        monitor = Monitor(name, "IterationCheckpoint")
        for row in (BEFORE, AFTER, ["sync/version", "policy/loss"]):
            monitor.look(row, evaluates=True)


@pytest.mark.parametrize("saver", [IterationCheckpoint, ModelCheckpoint])
def test_the_run_ends_after_its_first_iteration_which_is_saved(tiny_model, tmp_path, saver):
    savers = [saver(monitor="reward/meen")]
    if saver is ModelCheckpoint:
        savers = [ModelCheckpoint(monitor="reward/mean"), *savers, IterationCheckpoint(10)]
    trainer = trainer_of(tmp_path, [WeightSync(), *savers], enable_checkpointing=True)
    data = data_module(groups_per_iteration=2, group_size=2, evaluation=None)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(grpo(tiny_model), data)
    assert str(refused.value).startswith(
        f"{saver.__name__}(monitor='reward/meen'): no such metric was recorded; did you mean "
        "reward/mean? The recorded metrics are reward/"
    )
    assert [p.name for p in tmp_path.rglob("iteration_*")] == ["iteration_1.ckpt"]


def test_a_schedule_may_leave_as_much_staleness_as_the_collector_allows():
    # Pushed every 2 iterations, the second trains on weights that are one version behind.
    check_sync([FixedSchedule(2)], AsyncCollector(max_staleness=1))
    for schedule in (TrainerSchedule(4), FixedSchedule(4)):
        check_sync([schedule], AsyncCollector(max_staleness=3))
        with pytest.raises(ConfigError, match=r"up to 3 versions behind, .* raise max_staleness "):
            check_sync([schedule], AsyncCollector(max_staleness=2))
    check_sync([CollectorSchedule()], AsyncCollector(max_staleness=0))
    check_sync([FixedSchedule(9)], SyncCollector())  # which has no bound


def test_two_of_them_are_refused_in_python_too(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `WeightSync`"):
        trainer_of(tmp_path, [WeightSync(), WeightSync()])
