"""Test what is said of a run: its figures, curves that fit them, and alarms that are not chance."""

import random

import pytest

from lightning_rl.callbacks.report import RunReport, draw_curves, headline, plot_curves
from lightning_rl.callbacks.samples import FirstAndLast, Sample
from lightning_rl.run.processes.dist import announced


def history(accuracies, rewards, sampled=(), **extra):
    """Make rows of iterations 0, 1, ...; evaluated in each, and trained from the first on."""
    rows = [
        {"iteration": i, "eval/accuracy": a, "eval/reward_mean": r} | extra
        for i, (a, r) in enumerate(zip(accuracies, rewards, strict=True))
    ]
    for row, reward in zip(rows[1:], sampled, strict=False):
        row["reward/mean"] = reward
    return rows


BINARY = history([0.25, 0.5], [0.25, 0.5], [0.4])
CONTINUOUS = history([0.0, 0.0, 0.0], [0.60, 0.65, 0.70], [0.61, 0.68])
BOTH = history([0.0, 0.25], [0.5, 0.75], [0.6])
UNEVALUATED = [{"iteration": 0, "sync/version": 0}, {"iteration": 1, "reward/mean": 0.5}]


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (BINARY, ["eval/accuracy"]),
        (CONTINUOUS, ["eval/reward_mean"]),
        (history([1.0, 1.0], [3.0, 4.0]), ["eval/reward_mean"]),  # any reward is a success
        (history([0.0], [0.0]), ["eval/accuracy"]),
        (BOTH, ["eval/accuracy", "eval/reward_mean"]),
        (UNEVALUATED, ["reward/mean"]),
        ([], []),
    ],
)
def test_the_headline_is_what_the_task_has(rows, shown):
    assert headline(rows) == shown


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (BINARY, "1 iteration, accuracy 0.25 → 0.5"),
        (CONTINUOUS, "2 iterations, held-out reward 0.6 → 0.7"),
        (BOTH, "1 iteration, accuracy 0 → 0.25, held-out reward 0.5 → 0.75"),
        (UNEVALUATED, "1 iteration, reward of the rollouts 0.5"),
        ([*BINARY, {"iteration": 2}], "2 iterations, accuracy 0.25 → 0.5 (iteration 1)"),
        ([], "no metrics were recorded"),
    ],
)
def test_the_outcome_in_words(rows, said):
    report = RunReport()
    report.history.extend(rows)
    assert report._outcome() == said


def panels(figure):
    return {axes.get_ylabel(): axes for axes in figure.axes}


def lines(axes):
    return {line.get_label(): line.get_ydata().tolist() for line in axes.lines}


def test_curves_of_continuous_rewards_show_them_and_no_accuracy():
    figure = draw_curves(CONTINUOUS, "task: reward 0.6 → 0.7")
    assert figure.get_suptitle() == "task: reward 0.6 → 0.7"
    [(label, axes)] = panels(figure).items()
    assert label == "mean reward"
    assert lines(axes) == {"rollouts trained on": [0.61, 0.68], "held-out": [0.60, 0.65, 0.70]}
    low, high = axes.get_ylim()  # what was measured fills it
    assert 0.5 < low < 0.60 < 0.70 < high < 0.8


def test_no_panel_is_empty_and_the_accuracy_has_an_axis_that_fits():
    times = {f"time/{s}": 0.1 for s in ("generate", "reward", "logprob", "train", "sync", "eval")}
    times |= {"time/other": 0.4, "time/iteration": 1.0}
    figure = draw_curves([BINARY[0], BINARY[1] | times])
    assert list(panels(figure)) == ["mean reward", "held-out accuracy", "seconds per iteration"]
    assert list(panels(draw_curves(BINARY))) == ["mean reward", "held-out accuracy"]
    assert list(panels(draw_curves(BINARY[:1]))) == ["held-out accuracy"]
    assert draw_curves([{"iteration": 0, "sync/version": 0.0}]) is None

    def limits(*accuracies):
        axes = panels(draw_curves(history(accuracies, accuracies)))["held-out accuracy"]
        return axes.get_ylim()

    assert limits(0.01, 0.05) == pytest.approx((-0.03, 0.11))  # not 0 to 1, where it were a line
    assert limits(0.95, 0.96) == pytest.approx((0.86, 1.03))  # noise does not fill the height
    assert limits(0.0, 1.0) == pytest.approx((-0.03, 1.03))


def test_nothing_is_written_where_there_is_nothing_to_see(tmp_path):
    plot_curves([], str(tmp_path / "curves.png"))
    assert list(tmp_path.iterdir()) == []
    plot_curves(BOTH, str(tmp_path / "curves.png"), "both")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------- what chance explains


def test_the_lowest_mean_by_hand():
    # 3 standard errors of the difference: 3 sqrt(0.3^2 / 100 + 0.4^2 / 100) = 3 * 0.05.
    assert Sample(0.5, 0.3, 100).lowest(Sample(0.1, 0.4, 100), 3.0) == pytest.approx(0.35)
    # The error of many values is small: then a fifth of the standard deviation is the least.
    assert Sample(0.5, 0.3, 10**8).lowest(Sample(0.1, 0.3, 10**8), 3.0) == pytest.approx(0.44)


def test_the_fall_that_nobody_told_of_is_beyond_chance():
    def accuracy(share):
        return Sample(share, (share * (1 - share)) ** 0.5, 512)

    before, after = accuracy(0.129), accuracy(0.053)
    assert after.mean < before.lowest(after, 3.0)
    assert before.lowest(accuracy(0.11), 3.0) < 0.11  # which may well be noise


def test_ends_do_not_overlap_and_grow_until_they_have_enough():
    ends = FirstAndLast(window=2, least=5)
    for place in range(4):
        assert not ends.full
        ends.add([place, place])
    # Three iterations make six values, so a seventh iteration fills the other end.
    assert (ends.first, ends.last) == ([[0, 0], [1, 1], [2, 2]], [[3, 3]])
    for place in range(4, 8):
        ends.add([place, place])
    assert ends.full
    assert ends.last == [[5, 5], [6, 6], [7, 7]]
    assert ends.iterations == (3, 3)
    again = FirstAndLast(window=2, least=5)
    again.load_state_dict(ends.state_dict())
    assert again.both == ends.both == (Sample.of([0, 0, 1, 1, 2, 2]), Sample.of([5, 5, 6, 6, 7, 7]))


def test_runs_that_stand_still_raise_hardly_an_alarm_and_those_that_fall_do():
    random.seed(0)

    def group(share):
        """Draw the mean of 8 rewards, with luck of its own: some prompts are harder."""
        own = min(1.0, max(0.0, random.gauss(share, 0.1)))
        return sum(random.random() < own for _ in range(8)) / 8

    def alarm(shares):
        """Tell whether a run of these success rates, 16 groups each iteration, raises an alarm."""
        ends = FirstAndLast(3, least=16)
        for share in shares:
            ends.add([group(share) for _ in range(16)])
            if ends.full:
                before, now = ends.both
                if now.mean < before.lowest(now, 4.0):
                    return True
        return False

    assert sum(alarm([0.3] * 60) for _ in range(40)) <= 1
    assert all(alarm([0.3, 0.3, 0.3, 0.2, 0.1] + [0.05] * 3) for _ in range(40))


# -------------------------------------------------------------------- waiting


def test_a_wait_is_told_of_before_and_after(capfd):
    with announced("vLLM starts"):
        before = capfd.readouterr().err
    after = capfd.readouterr().err
    assert before == "vLLM starts ...\n"
    assert after.startswith("vLLM starts: done in ")
    assert after.endswith(" s\n")
    with announced(""):  # what is there at once
        pass
    assert capfd.readouterr().err == ""
