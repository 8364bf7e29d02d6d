"""Test what an evaluation says of held-out rollouts, set by set."""

import json

import pytest

from lightning_rl.callbacks import Evaluate, LearningAlarms, RunReport, WeightSync
from lightning_rl.collect.mixture import Mixture, PromptSet
from lightning_rl.collect.stats import evaluation_metrics, scores_by_prompt
from lightning_rl.envs import stats as env_stats
from lightning_rl.errors import DataError
from lightning_rl.rewards.rules import OverlongPenalty
from lightning_rl.rollout import Prompt, RolloutStatus
from tests.support.small_run import data_module, grpo, numbers, share_of_sevens, trainer_of


@pytest.fixture
def rollout_of(make_rollout):
    """Return a rollout of a prompt set, with its reward."""

    def make(prompt_set: str, reward: float):
        rollout = make_rollout([3], [4], reward=reward, group_id=f"{prompt_set}/{reward}")
        rollout.prompt = Prompt("p", "text", [3], set=prompt_set)
        return rollout

    return make


def test_a_set_without_rollouts_is_left_out(rollout_of):
    rows = evaluation_metrics(
        [rollout_of("sums", 1.0), rollout_of("sums", 0.0)], {"sums": 1, "x": 1}
    )
    assert rows["eval/accuracy"] == rows["eval/sums/accuracy"] == 0.5
    assert not [name for name in rows if name.startswith("eval/x/")]


def test_a_set_that_nobody_knows_is_named(rollout_of):
    with pytest.raises(DataError, match=r"prompt set 'y', which has no success_reward.*'sums'"):
        evaluation_metrics([rollout_of("y", 1.0)], {"sums": 1.0})


@pytest.mark.parametrize("measure", [evaluation_metrics, env_stats.evaluation_metrics])
def test_nothing_to_evaluate_is_said(measure):
    with pytest.raises(DataError, match="there are no"):
        measure([], 1.0)


# ---------------------------------------------------------------- parts of the reward


def test_each_part_of_the_reward_has_its_mean(make_rollout):
    def rollout(name, parts, reward=0.0, **options):
        made = make_rollout([3], [4], reward=reward, group_id=name, **options)
        made.reward_parts, made.prompt = parts, Prompt("p", "text", [3], set=name)
        return made

    rollouts = [
        rollout("sums", {"right": 1.0, "brief": 0.5}),
        rollout("sums", {"right": 0.0, "brief": None}),  # which does not apply
        rollout("sums", {"right": 1.0}, reward=None, status=RolloutStatus.FAILED),
        rollout("words", {"right": 0.5, "style": None}),
        rollout("plain", {"right": 0.3}),
    ]
    row = evaluation_metrics(rollouts, {"sums": 1.0, "words": 1.0, "plain": 1.0})
    parts = {name: value for name, value in row.items() if "/reward/" in name}
    assert parts == pytest.approx(
        {
            "eval/reward/right": (1.0 + 0.0 + 0.0 + 0.5 + 0.3) / 5,  # what failed counts as 0
            "eval/reward/brief": (0.5 + 0.0) / 2,  # of its own set alone
            "eval/sums/reward/right": 1 / 3,
            "eval/sums/reward/brief": 0.25,
            "eval/words/reward/right": 0.5,  # beside which a single part is the reward
        }
    )


def test_what_no_reward_can_reach_has_no_accuracy(rollout_of):
    rollouts = [rollout_of("can", 1.0), rollout_of("can", 0.0), rollout_of("cannot", 0.5)]
    row = evaluation_metrics([*rollouts, *rollouts], {"can": 1.0, "cannot": None})
    assert row["eval/accuracy"] == row["eval/can/accuracy"] == 0.5
    assert row["eval/pass@2"] == 0.5
    accuracies = ("accuracy", "accuracy_low", "accuracy_high", "pass@2")
    assert not [name for name in accuracies if f"eval/cannot/{name}" in row]
    assert row["eval/reward_mean"] == row["eval/cannot/reward_mean"] == 0.5
    alone = evaluation_metrics(rollouts[2:], {"can": 1.0, "cannot": None})
    assert not [name for name in alone if "accuracy" in name or "@" in name]
    scores = scores_by_prompt(rollouts, {"can": 1.0, "cannot": None})
    assert [len(scores["accuracy"]), len(scores["reward"])] == [1, 2]


class Sevens:
    """Shares of sevens, with a range of its own to declare."""

    def __init__(self, name, score_range):
        self.__name__, self.score_range = name, score_range

    def __call__(self, completions, completion_ids):
        return share_of_sevens(completions, completion_ids)


@pytest.mark.parametrize(
    ("rewards", "weights", "bound"),
    [
        ([Sevens("a", (0, 1)), Sevens("b", (0, 1))], [0.25, 0.125], "0.375"),
        ([Sevens("a", (0, 1)), Sevens("b", (0, 1))], [0.25, 0.25], None),  # the bound itself
        ([Sevens("a", (0, 1)), share_of_sevens], [0.25, 0.125], None),  # nobody knows
        ([Sevens("a", (0, 1)), share_of_sevens], [0.25, 0.0], "0.25"),
    ],
)
def test_an_evaluation_says_once_what_it_leaves_out(
    tiny_model, tmp_path, caplog, rewards, weights, bound
):
    caplog.set_level("INFO")
    few = {"limit": 2, "samples": 2}
    data = data_module(rewards=rewards, reward_weights=weights, evaluation=few)
    trainer, module = trainer_of(tmp_path, logger=False), grpo(tiny_model)
    rows = [trainer.validate(module, data, verbose=False)[0] for _ in range(2)]
    assert rows[0] == rows[1]
    first, second = (name for name in rows[0] if name.startswith("eval/reward/"))
    total = weights[0] * rows[0][first] + weights[1] * rows[0][second]
    assert rows[0]["eval/reward_mean"] == pytest.approx(total)
    kept = {"eval/accuracy", "eval/accuracy_low", "eval/pass@2"}
    assert kept & rows[0].keys() == (set() if bound else kept)
    said = [r.getMessage() for r in caplog.records if "success_reward" in r.getMessage()]
    assert said == [] if bound is None else len(said) == 1
    assert all(f"success_reward=0.5 is above {bound}, the most" in line for line in said)


def test_a_set_names_the_bound_that_is_its_own(caplog):
    caplog.set_level("INFO")
    penalty = OverlongPenalty(6, 2)
    held_out = [
        PromptSet("long", numbers(2), rewards=[penalty]),
        PromptSet("free", numbers(2), rewards=[penalty], success_reward=0.0),
    ]
    data = data_module(rewards=[share_of_sevens], evaluation=Mixture(held_out))
    assert data.held_out._success_rewards == {"long": None, "free": 0.0}
    assert "prompt set 'long': success_reward=0.5 is above 0.0" in caplog.text
    assert "'free'" not in caplog.text


def test_a_run_without_accuracy_reports_the_parts_and_still_has_its_alarm(tiny_model, tmp_path):
    held_out = Mixture([PromptSet("one", numbers(2)), PromptSet("two", numbers(2))])
    rewards = [Sevens("a", (0, 1)), Sevens("b", (0, 1))]
    data = data_module(
        rewards=rewards, reward_weights=[0.25, 0.125], evaluation=held_out,
        group_size=2, groups_per_iteration=2, iterations_per_epoch=1,
    )  # fmt: skip
    alarms, report = LearningAlarms(), RunReport()
    alarms.first_evaluation = {"eval/reward_mean": [1.0, 0.0, 4]}  # as if resumed
    trainer = trainer_of(tmp_path, [WeightSync(), Evaluate(), alarms, report])
    trainer.fit(grpo(tiny_model), data)
    [first, last], summary = report.history, json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert [summary["accuracy_before"], summary["accuracy_after"]] == [None, None]
    assert "eval/reward_mean of 4 prompts is" in summary["alarms"]["evaluation"]
    for row, told in ((first, summary["parts_before"]), (last, summary["parts_after"])):
        assert told == {"a": row["eval/reward/a"], "b": row["eval/reward/b"]}
        assert row["eval/one/reward/a"] + row["eval/two/reward/a"] == pytest.approx(2 * told["a"])
