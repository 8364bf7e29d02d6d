"""Test that batch_reward is called once per iteration, however its rollouts came about."""

import pytest

from lightning_rl.callbacks import Evaluate, RunReport, WeightSync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.extend import batch_reward
from tests.support.small_run import data_module, grpo, share_of_sevens, trainer_of


@batch_reward
class Calls:
    """Rewards half of each batch with 1: those with the larger ids."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def __call__(self, completion_ids, group_ids):
        self.groups.append(group_ids)
        order = sorted(range(len(completion_ids)), key=lambda i: completion_ids[i])
        scores = [0.0] * len(order)
        for place in order[len(order) // 2 :]:
            scores[place] = 1.0
        return scores


@pytest.mark.parametrize("collector", [SyncCollector(), AsyncCollector(1)])
def test_it_is_called_once_per_iteration_with_all_groups(tiny_model, tmp_path, collector):
    calls, report = Calls(), RunReport()
    data = data_module(
        rewards=[share_of_sevens, calls], reward_weights=[0.5, 2.0], collector=collector,
        groups_per_iteration=3, iterations_per_epoch=3,
    )  # fmt: skip
    trainer_of(tmp_path, [WeightSync(), report]).fit(grpo(tiny_model), data)
    assert len(calls.groups) == 3
    for groups in calls.groups:
        assert len(groups) == 24
        assert len(set(groups)) == 3
    for row in report.history[1:]:
        assert row["reward/Calls"] == 0.5
        total = 0.5 * row["reward/share_of_sevens"] + 2.0 * row["reward/Calls"]
        assert row["reward/mean"] == pytest.approx(total)


def test_an_evaluation_is_one_batch(tiny_model, tmp_path):
    calls = Calls()
    data = data_module(rewards=[calls], iterations_per_epoch=1)
    trainer_of(tmp_path, [WeightSync(), Evaluate()]).fit(grpo(tiny_model), data)
    assert sorted(map(len, calls.groups)) == [32, 32, 48]  # 8 prompts x 4, twice; 6 x 8
