"""Test the parts of lightning-rl compare: intervals, outcomes, schedule, configurations."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from lightning_rl.cli.compare import read_options
from lightning_rl.cli.compare.comparison import Comparison, order_of
from lightning_rl.cli.compare.configurations import Contender, read_contenders, record
from lightning_rl.cli.compare.intervals import EFFECT, Interval, half_width, pairs_needed
from lightning_rl.cli.compare.outcomes import FinalValue, Outcome, SecondsToTarget
from lightning_rl.cli.compare.report import table, verdict, verdicts, write
from lightning_rl.cli.compare.runs import BudgetSpent, Runs
from lightning_rl.errors import ConfigError, DataError

# ---------------------------------------------------------------- intervals


def integrated(differences, mean: float) -> float:
    """Return the likelihood ratio at a candidate mean, by integration instead of by its formula.

    Numerator: over the deviation s (with ds/s) and the effect, of the Gaussian likelihood, with the
    effect's own density; denominator: the same with an effect of 0.
    """
    x = torch.tensor(differences, dtype=torch.float64) - mean
    log_s = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    effects = torch.linspace(-10 * EFFECT, 10 * EFFECT, 2001, dtype=torch.float64)
    n, s = len(x), log_s.exp()
    squares = (x**2).sum() / s[:, None] ** 2
    squares = squares - 2 * x.sum() / s[:, None] * effects + n * effects**2
    joint = (-n * log_s[:, None] - squares / 2).exp()
    prior = torch.distributions.Normal(0.0, EFFECT).log_prob(effects).exp()
    over_s = joint.sum(0)
    above = (over_s * prior).sum() * (effects[1] - effects[0])
    return float(above / over_s[len(effects) // 2])  # the middle effect is 0


@pytest.mark.parametrize("differences", [[0.3, -0.1, 0.4, 0.2], [1.0, 2.5, 0.5, 3.0, -1.0, 1.5]])
@pytest.mark.parametrize("error", [0.05, 0.01])
def test_the_ratio_at_an_intervals_ends_is_one_over_the_error(differences, error):
    interval = Interval.of(differences, error)
    if len(differences) == 4 and error == 0.01:  # K = sqrt(sqrt(17) / 0.01) = 20.3 > w = 17
        assert (interval.low, interval.high) == (-math.inf, math.inf)
        return
    for end in (interval.low, interval.high):
        assert integrated(differences, end) == pytest.approx(1 / error, rel=1e-6)


def test_an_interval_of_eight_pairs_by_hand():
    # w = 1 + 8 * 4 = 33, K = (sqrt(33) / 0.05)^(1/4) = 3.274,
    # sqrt(7/8 * 2.274 * 33 / (33 - 3.274)) = 1.486
    assert half_width(8, 0.05) == pytest.approx(1.486, abs=1e-3)


@pytest.mark.parametrize("pairs", [0, 1, 2, 3])
def test_few_pairs_have_an_unbounded_interval(pairs):
    interval = Interval.of([0.5, 0.51, 0.52][:pairs], 0.05)
    assert not interval.decided
    assert interval.pairs == pairs
    assert half_width(3, 0.05) == math.inf  # K = (sqrt(13) / 0.05)^(2/3) = 17.3 > w = 13


def test_intervals_scale_and_shift_with_the_differences():
    differences = [0.3, -0.1, 0.4, 0.2, 0.35]
    own, other = (
        Interval.of([scale * d + shift for d in differences], 0.05)
        for scale, shift in ((1, 0), (-64, 5))
    )
    assert other.mean == pytest.approx(-64 * own.mean + 5, rel=1e-12)
    assert other.low == pytest.approx(-64 * own.high + 5, rel=1e-12)
    assert other.high == pytest.approx(-64 * own.low + 5, rel=1e-12)


def test_equal_differences_decide_nothing():
    """0.7 - 0.6 and 0.8 - 0.7 differ by rounding only."""
    interval = Interval.of([0.7 - 0.6, 0.8 - 0.7, 0.4 - 0.3, 0.3 - 0.2, 0.2 - 0.1], 0.05)
    assert not interval.decided
    assert interval.spread == 0
    assert not Interval.of([0.0] * 8, 0.05).decided


def test_looking_after_every_pair_misses_the_mean_in_less_than_the_error():
    """Of 2,000 sequences of 60 Gaussian differences; Student's intervals would miss in a third."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2000, 60)) * random.lognormal(0, 2, (2000, 1))
    ours = students = np.zeros(2000, dtype=bool)
    for n in range(4, 61):
        distance = np.abs(x[:, :n].mean(1)) / x[:, :n].std(1, ddof=1)
        ours = ours | (distance > half_width(n, 0.05))
        students = students | (distance * n**0.5 > 1.96)
    assert 0.01 < ours.mean() < 0.05
    assert students.mean() > 0.2


def test_pairs_needed_are_those_at_which_the_interval_excludes_zero():
    for mean, spread in ((0.02, 0.03), (-0.05, 0.03), (0.5, 0.01)):
        needed = pairs_needed(mean, spread, 0.05)
        assert half_width(needed, 0.05) * spread < abs(mean)
        assert half_width(needed - 1, 0.05) * spread >= abs(mean)
    assert pairs_needed(1e-6, 1.0, 0.05) is None


# ---------------------------------------------------------------- outcomes


def write_run(folder, rows, wall_s=100.0):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"wall_s": wall_s, "cpu_s": 50.0}))
    return folder


def rows_of(*accuracies):
    """Return a row each, at 10, 20, 30 s."""
    return [
        {"iteration": n, "wall_s": 10.0 * n, "cpu_s": 1.0, "eval/accuracy": accuracy}
        for n, accuracy in enumerate(accuracies, 1)
    ]


def test_an_outcome_is_the_last_value_and_the_first_time_at_the_target(tmp_path):
    rows = [*rows_of(0.2, 0.6, 0.5, 0.7), {"iteration": 5, "wall_s": 50.0, "reward/mean": 1.0}]
    run = write_run(tmp_path / "run", rows)
    assert FinalValue("eval/accuracy").answered_by(run) == Outcome(0.7, None, 100.0, 50.0)
    assert SecondsToTarget("eval/accuracy", 0.6).answered_by(run).reached_s == 20.0
    assert SecondsToTarget("eval/accuracy", 0.8).answered_by(run).reached_s is None


def test_a_metric_that_is_not_there_is_told_with_similar_ones(tmp_path):
    run = write_run(tmp_path / "run", rows_of(0.5))
    with pytest.raises(
        ConfigError, match=r"eval/acuracy: .* has no such metric, but eval/accuracy"
    ):
        FinalValue("eval/acuracy").answered_by(run)


def test_a_run_without_results_and_a_metric_without_a_value_are_refused(tmp_path):
    with pytest.raises(DataError, match="fast_dev_run"):
        FinalValue("eval/accuracy").answered_by(tmp_path / "none")
    run = write_run(tmp_path / "run", rows_of(0.5, None))
    with pytest.raises(DataError, match="the last eval/accuracy is nan"):
        FinalValue("eval/accuracy").answered_by(run)


@pytest.mark.parametrize(
    ("base", "other", "ratio"),
    [
        ((20.0, 100.0), (10.0, 80.0), 0.5),
        ((None, 100.0), (10.0, 80.0), 0.1),  # at least 100 s, so the true ratio is smaller still
        ((20.0, 100.0), (None, 80.0), 4.0),
        ((90.0, 100.0), (None, 80.0), 1.0),  # nobody knows who would have been first
        ((None, 100.0), (None, 80.0), 1.0),
    ],
)
def test_seconds_are_compared_as_long_as_both_runs_were_watched(base, other, ratio):
    asks = SecondsToTarget("eval/accuracy", 0.6)
    runs = [Outcome(0.5, reached, wall, 1.0) for reached, wall in (base, other)]
    assert asks.difference(*runs) == pytest.approx(math.log(ratio))
    assert asks.difference(*runs[::-1]) == pytest.approx(-math.log(ratio))


# ---------------------------------------------------------------- rounds


def test_runs_alternate_in_their_order():
    assert [order_of("AB", seed) for seed in range(3)] == [["A", "B"], ["B", "A"], ["A", "B"]]
    assert order_of(["base", "b", "c"], 1) == ["c", "b", "base"]


class Planned(Runs):
    """Runs whose results are given, by configuration and seed, and that take ten seconds each."""

    def __init__(self, folder, values) -> None:
        super().__init__(folder, [Contender(name, {"model": name}, []) for name in values])
        self.values, self.trained = values, []

    def train(self, name, seed, deadline) -> None:
        rows = [{"iteration": 1, "wall_s": 10.0, "eval/accuracy": self.values[name][seed]}]
        write_run(self.directory(name, seed), rows)
        self.seconds[name, seed] = 10.0
        self.trained.append((name, seed))


BASE = [0.50, 0.52, 0.51, 0.49, 0.50, 0.51]
BETTER = [0.70, 0.73, 0.70, 0.70, 0.71, 0.70]  # by 0.20, 0.21, 0.19, 0.21: decided after four
SAME = [0.51, 0.50, 0.52, 0.48, 0.51, 0.50]


def compared(folder, values, others, **asked):
    return Comparison("base", others, FinalValue("eval/accuracy"), Planned(folder, values))


def test_a_decided_configuration_is_not_trained_any_more(tmp_path):
    values = {"base": BASE, "better": BETTER, "same": SAME}
    comparison = compared(tmp_path, values, ["better", "same"])
    assert list(comparison.train(6, math.inf)) == [150, 120, 90, 40, 20, 0]
    trained = comparison.runs.trained
    assert trained[:4] == [("base", 0), ("better", 0), ("same", 0), ("same", 1)]
    seeds = {name: [seed for of, seed in trained if of == name] for name in values}
    # Half of the error for each: with four pairs K = sqrt(sqrt(17) / 0.025) = 12.8 < 17.
    assert seeds == {"base": [*range(6)], "better": [*range(4)], "same": [*range(6)]}
    assert comparison.undecided() == ["same"]
    assert "better has a higher eval/accuracy than base: decided after 4 pairs." in said_by(
        comparison
    )
    assert verdict(comparison, "same").startswith("same and base: undecided after 6 pairs; if")
    assert "all 2 hold at once with probability 0.95 (Bonferroni)" in said_by(comparison)


def said_by(comparison) -> str:
    return "\n".join([table(comparison), *verdicts(comparison)])


def test_a_round_that_the_budget_does_not_admit_is_not_begun(tmp_path):
    comparison = compared(tmp_path, {"base": BASE, "same": SAME}, ["same"])
    with pytest.raises(BudgetSpent, match="another round takes 20 s"):
        list(comparison.train(6, 15.0))
    assert comparison.runs.trained == [("base", 0), ("same", 0)]


def test_the_files_of_a_comparison_say_what_the_table_says(tmp_path):
    comparison = compared(tmp_path, {"base": BASE, "better": BETTER}, ["better"])
    list(comparison.train(6, math.inf))
    write(comparison)
    result = json.loads((tmp_path / "compare.json").read_text())
    [found] = result["comparisons"]
    interval = Interval.of([0.2, 0.21, 0.19, 0.21], 0.05)
    assert (found["pairs"], found["decided"]) == (4, True)
    assert found["low"] == pytest.approx(interval.low)
    assert [run["seed"] for run in result["runs"]] == [0, 1, 2, 3] * 2
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    assert "seed_3" in (tmp_path / "view.html").read_text()


def test_before_any_run_has_ended_there_is_no_table(tmp_path):
    comparison = compared(tmp_path, {"base": BASE, "same": SAME}, ["same"])
    assert said_by(comparison) == "\nsame and base: undecided after 0 pairs."
    write(comparison)


# ---------------------------------------------------------------- folders and command lines


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, but no comparison"):
        Runs(tmp_path, [])


def test_changed_configurations_are_refused_with_their_keys(tmp_path):
    trees = [{"model": {"lr": lr, "clip": 0.2}, "data": {"size": 8}} for lr in (0.1, 0.2)]
    record(tmp_path, [Contender("a", trees[0], [])])
    record(tmp_path, [Contender("a", trees[0], []), Contender("b", trees[1], [])])
    with pytest.raises(ConfigError, match=r"runs of a .*model\.lr: 0\.1 then, 0\.2 now"):
        record(tmp_path, [Contender("a", trees[1], [])])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "but got 0"),
        (["a.yaml"], "but got 1"),
        (["a.yaml", "b.yaml", "c.yaml"], "but got 3"),
        (["--against", "a.yaml"], "but got 1"),
        (["a.yaml", "--data.group_size", "8"], r"but got 1 \(options of fit: --data.group_size 8"),
        (["a.yaml", "b.yaml", "--seeds", "1"], "--seeds=1 must be >= 2"),
        (["a.yaml", "b.yaml", "--budget", "2"], "--budget='2' must be a duration"),
        (["a.yaml", "b.yaml", "--target", "nan"], "--target=nan must be finite"),
    ],
)
def test_an_impossible_command_line_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        read_options(arguments)


def test_files_options_and_overrides_are_told_apart():
    words = ["b.yaml", "c.yaml", "--against", "a.yaml", "--budget", "1h30m", "--trainer.max_epochs"]
    own, files, overrides = read_options([*words, "2"])
    assert (files, own.budget, own.seeds) == (["a.yaml", "b.yaml", "c.yaml"], 5400.0, 8)
    assert overrides == ["--trainer.max_epochs", "2"]
    assert read_options(["a.yaml", "b.yaml"]).own.budget == math.inf


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model):
    """Return a folder with a configuration and two files of differences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1="}\n')
    tree = {
        "model": {"class_path": "PolicyModule", "init_args": {"model": str(tiny_model)}},
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": "train.jsonl",
                "evaluation": {"prompts": "train.jsonl"},
                "rewards": ["recipes.sort_digits.reward.exact_match"],
            },
        },
        "trainer": {
            "callbacks": [
                {"class_path": "HFExport", "init_args": {"directory": "precious"}},
                "RunArtifacts",
            ]
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "wide.yaml").write_text("data: {init_args: {group_size: 4}}")
    (tmp_path / "same.yaml").write_text("data: {init_args: {group_size: 8}}")
    return tmp_path


def test_runs_evaluate_and_keep_out_of_each_others_files(place):
    first, second = read_contenders(["run.yaml", "run.yaml+wide.yaml"], [], "eval/accuracy")
    assert [first.name, second.name] == ["run", "run+wide"]
    assert first.changes_to(second) == ["data.group_size 4, not 8"]
    callbacks = {
        node["class_path"]: node["init_args"] for node in first.tree["trainer"]["callbacks"]
    }
    names = {path.rpartition(".")[2]: given for path, given in callbacks.items()}
    assert names["HFExport"]["directory"] is None
    assert "Evaluate" in names
    assert "RunArtifacts" not in names
    # So another metric is asked of the same configurations, whose runs may be there already.
    assert read_contenders(["run.yaml", "run.yaml+wide.yaml"], [], "reward/mean") == [first, second]


def test_a_metric_of_evaluations_needs_something_to_evaluate_on(place):
    command = ["run.yaml", "run.yaml+wide.yaml"], ["--data.evaluation=null"]
    with pytest.raises(ConfigError, match=r"no eval/accuracy; set data\.evaluation"):
        read_contenders(*command, "eval/accuracy")
    [without, _] = read_contenders(*command, "reward/mean")
    assert "Evaluate" not in str(without.tree)


def test_overrides_hold_for_all(place):
    found = read_contenders(
        ["run.yaml", "run.yaml+wide.yaml"], ["--data.groups_per_iteration=6"], "reward/mean"
    )
    assert [one.tree["data"]["init_args"]["groups_per_iteration"] for one in found] == [6, 6]


def test_equal_configurations_and_checkpoints_are_refused(place):
    with pytest.raises(ConfigError, match="are the same configuration"):
        read_contenders(["run.yaml", "run.yaml+same.yaml"], [], "reward/mean")
    with pytest.raises(ConfigError, match=r"ckpt_path='last', but all runs .* begin anew"):
        read_contenders(["run.yaml", "run.yaml+wide.yaml"], ["--ckpt_path=last"], "reward/mean")


def test_files_of_the_same_name_are_told_apart_by_their_folders(place):
    for folder in ("a", "b"):
        (place / folder).mkdir()
        tree = yaml.safe_load((place / "run.yaml").read_text())
        tree["data"]["init_args"]["group_size"] = 3 + len(folder) + ord(folder)
        (place / folder / "run.yaml").write_text(yaml.safe_dump(tree))
    found = read_contenders(["a/run.yaml", "b/run.yaml"], [], "reward/mean")
    assert [one.name for one in found] == ["a-run", "b-run"]
