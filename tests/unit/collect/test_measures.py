"""Test token metrics, stage times, evaluation metrics and collection statistics."""

import json
import math

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.collect.estimates import share_interval
from lightning_rl.collect.stats import evaluation_metrics, own_metrics, rollout_metrics
from lightning_rl.errors import ConfigError
from lightning_rl.games.staged.report import StagedReport
from lightning_rl.rollout import RolloutStatus
from lightning_rl.run import clock as stages
from lightning_rl.run.clock import STAGES, StageClock
from lightning_rl.run.files.metrics import (
    MetricsLog,
    read_rows,
    summarize,
)
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.token_metrics import TokenMetrics

# ---------------------------------------------------------------- token metrics


def test_means_are_over_tokens_not_over_micro_batches():
    metrics = TokenMetrics()
    metrics.add({"a": torch.tensor([1.0, 2.0, 3.0]), "gap_max": torch.tensor([0.5, -2.0])})
    metrics.add({"a": torch.tensor([10.0]), "gap_max": torch.tensor([0.25])})
    metrics.add({"a": torch.tensor([]), "b": torch.tensor([])})
    assert metrics.compute() == {"a": 4.0, "gap_max": 0.5}  # (1 + 2 + 3 + 10) / 4


def test_a_broken_number_is_not_hidden():
    metrics = TokenMetrics()
    metrics.add({"a": torch.tensor([1.0, math.nan]), "gap_max": torch.tensor([math.nan, 1.0])})
    metrics.add({"gap_max": torch.tensor([])})
    computed = metrics.compute()
    assert computed.keys() == {"a", "gap_max"}
    assert all(math.isnan(value) for value in computed.values())


def test_no_metrics_are_no_metrics():
    assert TokenMetrics().compute() == {}


def test_metrics_carry_no_gradient():
    metrics = TokenMetrics()
    metrics.add({"loss": torch.ones(3, requires_grad=True) * 2})
    assert metrics.compute() == {"loss": 2.0}
    assert not any(total.requires_grad for total in metrics._sums.values())


def test_summarize():
    assert summarize([1.0, 3.0]) == (2.0, 1.0)
    assert all(math.isnan(x) for x in summarize([]))


# ---------------------------------------------------------------- stages


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """Return a clock that the test moves by hand: now[0] seconds."""
    time = [100.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: time[0])
    return time


def test_a_nested_stage_stops_the_outer_one(now):
    clock = StageClock()
    now[0] += 7  # before any stage: nobody's
    with clock("generate"):
        now[0] += 1
        with clock("sync"):
            now[0] += 10
            assert clock.stage == "sync"
        now[0] += 2
    now[0] += 50
    assert clock.stage == "other"
    assert clock.take() == dict.fromkeys(STAGES, 0.0) | {"generate": 3.0, "sync": 10.0}


def test_an_evaluation_keeps_what_it_generates_and_grades(now):
    clock = StageClock()
    with clock("eval"):
        now[0] += 1
        with clock("generate"):
            assert clock.stage == "eval"
            now[0] += 10
        now[0] += 1
    assert clock.take() == dict.fromkeys(STAGES, 0.0) | {"eval": 12.0}


def test_taking_in_the_middle_of_a_stage_splits_it(now):
    clock = StageClock()
    with clock("train"):
        now[0] += 2
        assert clock.take()["train"] == 2.0
        now[0] += 5
    assert clock.take()["train"] == 5.0
    assert clock.take() == dict.fromkeys(STAGES, 0.0)


def test_a_stage_that_raises_is_over(now):
    clock = StageClock()

    def grade() -> None:
        with clock("reward"):
            now[0] += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        grade()
    now[0] += 4
    assert clock.stage == "other"
    assert clock.take()["reward"] == 3.0


def test_listeners_hear_every_change(now):
    clock, heard = StageClock(), []
    clock.listeners.append(heard.append)
    with clock("generate"), clock("sync"):
        pass
    assert heard == ["generate", "sync", "generate", "other"]


def test_a_stage_of_ones_own_stops_the_others_and_keeps_its_column(now):
    clock = StageClock()
    with clock("generate"):
        now[0] += 1
        with clock("simulator"):
            now[0] += 10
    assert clock.take() == dict.fromkeys(STAGES, 0.0) | {"generate": 1.0, "simulator": 10.0}
    assert clock.take()["simulator"] == 0.0


@pytest.mark.parametrize("name", ["other", "iteration"])
def test_a_stage_cannot_have_the_name_of_a_sum(name):
    with pytest.raises(ConfigError, match=f"clock.'{name}'.: StepTimer uses the name {name}"):
        StageClock()(name).__enter__()


# ---------------------------------------------------------------- evaluation


def test_evaluation_metrics_by_hand(make_rollout):
    rewards = {"a": [1.0, 0.5, 0.0, 0.0], "b": [1.0, 2.0, 1.0, 0.9]}
    rollouts = [make_rollout([3], [4, 1], group_id=g, reward=r) for g in "ab" for r in rewards[g]]
    rollouts[3] = make_rollout([3], [4] * 6, group_id="a", finish_reason="length")
    metrics = evaluation_metrics(rollouts, {"": 1.0})
    bounds = {name: metrics.pop(name) for name in list(metrics) if name.endswith(("_low", "_high"))}
    assert bounds == pytest.approx(
        {
            **bounds_of("eval/accuracy", share_interval([1, 3], [4, 4], 8)),
            **bounds_of("eval/pass@2", share_interval([0.5, 1.0], [1, 1], 4)),
            **bounds_of("eval/pass@4", share_interval([1, 1], [1, 1], 2)),
        }
    )
    assert metrics == pytest.approx(
        {
            "eval/accuracy": 4 / 8,
            "eval/reward_mean": 6.4 / 8,
            # Squares: 1 + .25 + 1 + 4 + 1 + .81 = 8.06.
            "eval/reward_std": math.sqrt(8.06 / 8 - 0.8**2),
            "eval/tokens_mean": 20 / 8,
            "eval/truncated_share": 1 / 8,
            "eval/pass@2": (0.5 + 1.0) / 2,  # 1 of 4 and 3 of 4 are right
            "eval/pass@4": 1.0,
        }
    )


def bounds_of(name, interval):
    return dict(zip((f"{name}_low", f"{name}_high"), interval, strict=True))


def test_the_most_frequent_answer_counts_where_a_reward_gives_answers(make_rollout):
    said = {"a": ["7", "8", "7", None], "b": ["1", "1", "2", "2"]}
    rollouts = [
        make_rollout([3], [4], group_id=group, reward=float(answer in ("7", "2")))
        for group in said
        for answer in said[group]
    ]
    assert "eval/maj@2" not in evaluation_metrics(rollouts, {"": 1.0})
    for rollout, answer in zip(rollouts, said["a"] + said["b"], strict=True):
        rollout.extra["answer"] = answer
    metrics = evaluation_metrics(rollouts, {"": 1.0})
    # By pairs: a draw of 7 and 8, then 7 alone; twice 1, twice 2.
    assert metrics["eval/maj@2"] == pytest.approx((0.75 + 0.5) / 2)
    # Of all four: 7 wins; 1 and 2 draw.
    assert metrics["eval/maj@4"] == pytest.approx((1.0 + 0.5) / 2)
    assert 0 < metrics["eval/maj@4_low"] < 0.75 < metrics["eval/maj@4_high"] < 1


def test_what_could_not_be_graded_counts_as_wrong(make_rollout):
    rollouts = [
        make_rollout([3], [1], group_id="a", reward=1.0),
        make_rollout([3], [1], group_id="b", reward=None, status=RolloutStatus.FAILED),
        make_rollout([3], [], group_id="c", reward=None, status=RolloutStatus.ABORTED),
    ]
    metrics = evaluation_metrics(rollouts, {"": 1.0})
    assert metrics["eval/accuracy"] == pytest.approx(1 / 3)
    assert "eval/pass@2" not in metrics


def lengths(rollouts):
    return {"longest": max(len(r.token_ids) for r in rollouts), "rollouts": len(rollouts)}


def test_metrics_of_ones_own_see_all_rollouts_and_are_recorded_beside_the_others(make_rollout):
    rollouts = [make_rollout([3], [4] * n, group_id="a", reward=1.0) for n in (2, 5)]
    known = evaluation_metrics(rollouts, {"": 1.0})
    found = own_metrics([lengths], rollouts, known)
    assert found == {"eval/longest": 5.0, "eval/rollouts": 2.0}


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([lambda rollouts: {"accuracy": 1.0}], "eval/accuracy is already recorded"),
        ([lengths, lengths], "eval/longest is already recorded"),
        ([lambda rollouts: 0.5], r"returned 0.5; it must return numbers by name"),
        ([lambda rollouts: {"a": "b"}], r"returned \{'a': 'b'\}; it must return numbers"),
        ([lambda rollouts: {"a": 1 / 0}], "raised ZeroDivisionError: division by zero"),
    ],
)
def test_metrics_of_ones_own_that_cannot_be_used(make_rollout, functions, message):
    rollouts = [make_rollout([3], [4], group_id="a", reward=1.0)]
    with pytest.raises(ConfigError, match=message):
        own_metrics(functions, rollouts, evaluation_metrics(rollouts, {"": 1.0}))


# ---------------------------------------------------------------- collection


def test_collection_metrics_by_hand(make_rollout):
    def part(exact, style):
        return {"exact": exact, "style": style}

    rollouts = [
        make_rollout([3], [4, 1], group_id="a", reward=1.0, reward_parts=part(1.0, 0.0)),
        make_rollout([3], [4, 1], group_id="a", reward=0.0, reward_parts=part(0.0, None)),
        make_rollout([3], [1], group_id="b", reward=0.5, reward_parts=part(0.5, 1.0)),
        make_rollout([3], [1], group_id="b", reward=0.5, reward_parts=part(0.5, 0.0)),
        make_rollout(
            [3],
            [4, 5, 6],
            group_id="c",
            reward=None,
            status=RolloutStatus.FAILED,
            finish_reason="length",
            # The oldest model token is of version 3; the environment's -1 is no version.
            versions=[5, -1, 3],
            loss_mask=[True, False, True],
        ),
    ]
    for rollout in rollouts[:4]:
        rollout.rows[0].versions = [5] * len(rollout.token_ids)
    metrics = rollout_metrics(rollouts, seconds=2.0, trainer_version=6)
    assert metrics == pytest.approx(
        {
            "rollout/tokens_mean": 9 / 5,
            "rollout/tokens": 9.0,
            "rollout/tokens_per_s": 4.5,
            "rollout/truncated_share": 0.2,
            "rollout/failed_share": 0.2,
            "rollout/init": 0.0,
            "rollout/completed": 4.0,
            "rollout/aborted": 0.0,
            "rollout/failed": 1.0,
            "rollout/archived": 0.0,
            "rollout/expired": 0.0,
            "rollout/skipped": 0.0,
            "rollout/staleness_max": 3.0,
            "rollout/staleness_mean": (6 * 1 + 1 + 3) / 8,  # by the model's tokens
            "reward/mean": 0.5,
            "reward/std": math.sqrt(0.125),
            "reward/exact": 0.5,
            "reward/exact_std": math.sqrt(0.125),
            "reward/style": 1 / 3,
            "reward/style_std": math.sqrt(2 / 9),
            "reward/zero_spread_share": 0.5,
        }
    )


def test_statistics_of_a_batch_in_which_nothing_was_graded(make_rollout):
    failed = make_rollout([3], [1], reward=None, status=RolloutStatus.FAILED)
    metrics = rollout_metrics([failed], seconds=1.0, trainer_version=0)
    assert metrics["rollout/failed"] == 1.0
    assert "reward/mean" not in metrics


def test_what_a_collector_cut_is_counted_and_dilutes_no_mean(make_rollout):
    rollouts = [
        make_rollout([3], [4, 5, 1], finish_reason="length", versions=[2, 2, 2]),
        make_rollout([3], [], status=RolloutStatus.ABORTED, finish_reason=None, reward=None),
        make_rollout([3], [4], status=RolloutStatus.EXPIRED, finish_reason=None, reward=None),
    ]
    metrics = rollout_metrics(rollouts, seconds=1.0, trainer_version=2)
    assert (metrics["rollout/aborted"], metrics["rollout/expired"]) == (1, 1)
    assert (metrics["rollout/tokens_mean"], metrics["rollout/truncated_share"]) == (3, 1)
    assert metrics["rollout/staleness_max"] == 0  # the expired token is not trained on


# ---------------------------------------------------------------- files


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_files_of_metrics_are_strict_json(tmp_path, broken):
    """Values that are not finite are null, which is read as NaN, whatever is recorded."""
    trainer = Trainer(default_root_dir=tmp_path, logger=CSVLogger(tmp_path), accelerator="cpu")
    log = MetricsLog()
    log.begin(trainer)
    log.add(trainer, {"iteration": 1, "policy/loss": broken, "reward/mean": 0.5})
    (tmp_path / "staged").mkdir()
    StagedReport(tmp_path / "staged").note(1, {"reward/mean": broken})
    for file in (log._path(), tmp_path / "staged/metrics.jsonl"):
        [line] = file.read_text().splitlines()
        assert None in json.loads(line, parse_constant=refuse).values()
        [row] = read_rows(file.read_text())
        assert [name for name, value in row.items() if math.isnan(value)] == [
            name for name in row if name in ("policy/loss", "reward/mean") and row[name] != 0.5
        ]
    nested = json.loads(dumps({"a": [{"b": (broken, 1)}]}), parse_constant=refuse)
    assert nested == {"a": [{"b": [None, 1]}]}
