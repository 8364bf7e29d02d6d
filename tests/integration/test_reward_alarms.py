"""RewardAlarms: each alarm's arithmetic by hand, and a real run that games its reward."""

import logging
import math

import pytest
import torch

from lightning_rl.callbacks import RewardAlarms, RunReport, WeightSync
from lightning_rl.callbacks.reward_alarms import component_drifts, duplicate_shares, summary_row
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Prompt
from tests.support.small_run import data_module, numbers, trainer_of


def rollout_of(make_rollout, group, completion, **fields):
    rollout = make_rollout([3], completion, group_id=group, **fields)
    rollout.prompt = Prompt(group.rstrip("'"), "text", [3])
    return rollout


def test_duplicates_within_a_group_and_across_prompts(make_rollout):
    rollouts = [
        rollout_of(make_rollout, group, completion)
        for group, completion in [
            ("a", [4, 1]), ("a", [4, 1]), ("a", [5, 1]), ("a", [6, 1]),
            ("b", [5, 1]), ("b", [7, 1]), ("b", [8, 1]), ("b'", [8, 1]),
        ]
    ]  # fmt: skip
    # Within: both [4, 1]. Across: both [5, 1]; the [8, 1] are of one prompt, drawn twice.
    assert duplicate_shares(rollouts) == (2 / 8, 2 / 8)


def test_a_row_sums_up_an_iteration(make_rollout):
    rollouts = [
        make_rollout([3], [4, 1], reward=1.0, reward_parts={"x": 1.0, "y": None}),
        make_rollout([3], [4, 5, 6, 1], reward=0.0, reward_parts={"x": 0.0, "y": None}),
    ]
    assert summary_row(rollouts, 0.25) == {
        "tokens": 3, "duplicates": 0.25, "reward": 0.5, "part/x": 0.5, "std/x": 0.5,
    }  # fmt: skip


def test_component_drifts_by_hand():
    first = [{"part/a": 0.0, "std/a": 0.5, "part/b": 1.0, "std/b": 0.2}] * 2
    last = [
        {"part/a": 0.5, "std/a": 0.25, "part/b": 0.6, "std/b": 0.4},
        {"part/a": 1.0, "std/a": 0.25, "part/b": 0.4, "std/b": 0.4},
    ]
    # a: 0 -> 0.75, std max(0.5, 0.25); b: 1 -> 0.5, std max(0.2, 0.4)
    assert component_drifts(first, last, {"a": 1.0, "b": 0.0}) == pytest.approx(
        {"a": 1.5, "b": -1.25}
    )
    # What costs (a negative weight) gets better by falling.
    assert component_drifts(first, last, {"b": -2.0}) == pytest.approx({"b": 1.25})
    # It applied to nothing at one end.
    assert component_drifts(first, last, {"c": 1.0}) == {}
    steady = [{"part/a": 1.0, "std/a": 0.0}]
    assert component_drifts(steady, steady, {"a": 1.0}) == {"a": 0.0}
    assert component_drifts(steady, [{"part/a": 2.0, "std/a": 0.0}], {"a": 1.0}) == {"a": math.inf}


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="window=0 must be >= 1"):
        RewardAlarms(window=0)
    with pytest.raises(ConfigError, match=r"length_ratio=0\.5 must be >= 1"):
        RewardAlarms(length_ratio=0.5)


def sevens(completion_ids):
    """Pays for every seven, so for long completions of nothing else."""
    return [float(ids.count(10)) for ids in completion_ids]


def other_digits(completion_ids):
    """What was wanted: as many different digits as possible."""
    return [float(len(set(ids) - {1, 10})) for ids in completion_ids]


def run(tiny_model, tmp_path, rewards, weights, callbacks, iterations):
    torch.manual_seed(0)
    report = RunReport()
    data = data_module(
        train_prompts=numbers(100, 120, seed=1),
        eval_prompts=None,
        rewards=rewards,
        sampling=Sampling(max_tokens=40),
        group_size=6,
        groups_per_iteration=4,
        iterations_per_epoch=iterations,
        reward_weights=weights,
        seed=1,
    )
    module = PolicyModule(
        str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), seed=1
    )
    trainer_of(tmp_path, [WeightSync(), *callbacks, report], logger=False).fit(module, data)
    return [row for row in report.history if "alarm/length" in row]


@pytest.mark.slow
def test_a_policy_that_games_its_reward_sets_off_the_alarms(tiny_model, tmp_path, caplog):
    alarms = RewardAlarms(window=2, length_ratio=1.3)
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        history = run(tiny_model, tmp_path, [sevens, other_digits], [1.0, 0.0], [alarms], 9)
    # Nothing can be said before 2 x 2 iterations.
    assert {row[f"alarm/{name}"] for row in history[:3] for name in alarms.on} == {0.0}
    for name in ("length", "duplicates", "components"):
        assert history[-1][f"alarm/{name}"] == 1.0, name
        assert sum(f"alarm/{name}" in r.getMessage() for r in caplog.records) == 1
    assert "reward sevens rose" in caplog.text
    assert "while other_digits fell" in caplog.text
    # The alarms of every run say so as soon as they have groups enough at either end.
    assert "LearningAlarms (gaming), iteration 8: the reward other_digits went from" in caplog.text
    assert history[-1]["alarm/eval"] == 0.0  # nothing was evaluated
    assert history[-1]["rollout/duplicates_across"] > history[0]["rollout/duplicates_across"] + 0.3


def feed_evaluations(alarms, module, steps):
    """Rows of (reward, evaluation) as a run would add them; which of them set off the alarm."""
    on = []
    for reward, value in steps:
        alarms._add({"reward": reward, "tokens": 1.0, "duplicates": 0.0})
        alarms.on_iteration_end(None, module, {} if value is None else {"eval/accuracy": value})
        on.append(alarms.on["eval"])
    return on


def test_the_evaluation_alarm_by_hand(tiny_model):
    alarms = RewardAlarms(window=1, eval_drop=0.1)
    module = PolicyModule(str(tiny_model))
    steps = [
        (0.2, 0.5),
        (0.3, None),
        (0.4, 0.6),  # the best
        (0.5, 0.55),  # lower, but by less than 0.1
        (0.6, 0.45),  # 0.15 lower, and the reward is higher
        (0.3, 0.45),  # as low, but now the reward fell too
        (0.7, 0.40),
        (0.9, 0.65),  # a new best
    ]
    assert feed_evaluations(alarms, module, steps) == [
        False, False, False, False, True, False, True, False,
    ]  # fmt: skip


def test_a_resumed_run_compares_with_the_first_iterations(tiny_model):
    module = PolicyModule(str(tiny_model))
    whole, before, after = (RewardAlarms(window=2) for _ in range(3))
    steps = [(0.1 * i, 0.9 - 0.1 * i) for i in range(8)]
    feed_evaluations(whole, module, steps)
    feed_evaluations(before, module, steps[:3])
    after.load_state_dict(before.state_dict())
    feed_evaluations(after, module, steps[3:])
    assert after.state_dict() == whole.state_dict()
    assert whole.on["eval"]
