"""Test the parts of lightning-rl bisect: the window of a drop, its noise, and each signature."""

from dataclasses import replace
from itertools import count

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.bisect.curve import (
    Window,
    beyond_noise,
    cost_of,
    curve_of,
    largest_drop,
    stands_out,
)
from lightning_rl.cli.bisect.page import page_of
from lightning_rl.cli.bisect.patterns import pattern
from lightning_rl.cli.bisect.search import Bisection, told_apart
from lightning_rl.cli.bisect.signatures import (
    contradictions,
    credit,
    gap,
    new_set,
    out_of_range,
    outlier,
    rate,
    stale,
    suspicions,
)
from lightning_rl.cli.bisect.suspicion import Cause, Suspicion, span
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.collect.estimates import Comparison
from lightning_rl.errors import DataError


def test_the_window_is_as_narrow_as_the_drop():
    curve = {0: 0.1, 2: 0.8, 4: 0.9, 6: 0.88, 8: 0.2, 10: 0.15, 12: 0.1, 14: 0.3}
    # From 0.9 to 0.1; 0.88 is within a fifth of it from the top, 0.2 from the bottom.
    assert largest_drop(curve) == Window(6, 8, 28)  # 8 values make 28 pairs
    assert largest_drop({0: 0.1, 1: 0.2, 2: 0.2}) is None


def test_the_largest_of_many_differences_needs_to_be_larger():
    before = {str(n): 1.0 for n in range(100)}
    after = {key: float(int(key) >= 5) for key in before}  # 5 of 100 lost
    found = Comparison.of(before, after)
    # -0.05 with a standard error of sqrt(0.05 * 0.95 / 99) = 0.0219: 2.28 of them
    assert beyond_noise(found)
    assert not beyond_noise(found, 28)  # 3.12 are needed


def test_a_drop_is_compared_with_the_curves_other_steps():
    calm = {n: 1.0 + 0.01 * (n % 2) for n in range(6)}  # steps of 0.01 and -0.01, which differ by
    # 0.02: a spread of 0.02 / 1.128 = 0.01772
    assert stands_out(calm | {6: 0.5}, Window(5, 6), 4.0)
    assert not stands_out(calm | {6: 0.94}, Window(5, 6), 4.0)  # 0.07 of 0.0709
    assert stands_out(calm | {6: 0.94}, Window(5, 6), 3.9)  # 0.0691
    slowing = {n: 0.1 * n - 0.01 * n**2 for n in range(6)}  # each step is 0.02 less than the last
    assert stands_out(slowing | {6: 0.2}, Window(5, 6), 2.0)  # 0.05, where steps were up to 0.09
    assert not stands_out({0: 0.2, 1: 0.9, 2: 0.8, 3: 0.7}, Window(1, 2), 2.0)  # tells no noise
    late = {0: 0.8, 2: 0.2} | {n: 0.2 + 0.01 * (n % 2) for n in range(3, 7)}
    assert stands_out(late, Window(0, 2), 4.0)  # the noise is told by the steps after it
    verdict = told_apart(calm | {6: 0.9, 7: 0.2}, Window(5, 7), "reward/mean")
    assert verdict.iteration == 7
    assert "choose eval/accuracy" in verdict.notes[0]


def test_what_was_recorded_is_said():
    rows = {0: {"eval/accuracy": 0.5, "eval/tokens_mean": 3.0}, 1: {"eval/accuracy": float("nan")}}
    with pytest.raises(DataError, match=r"recorded 1 times, .* were eval/accuracy, eval/tokens"):
        curve_of(rows, "eval/accuracy")


def test_the_cost_is_said_before():
    said = cost_of(Window(8, 24), {9: {"time/train": 2.0}}, 600.0)
    assert "up to 6 evaluations" in said  # both ends, and log2(16)
    assert "took 2 s" in said
    assert "after 600 s" in said


def test_a_span_begins_after_calm_ones_and_ends_with_the_last_in_a_row():
    values = dict(enumerate([1, 1, 1, 1, 5, 6, 1, 9], 1))
    assert span(values, lambda before: 2 * max(before), 2) == (5, 6)
    assert span(values, lambda before: 2 * max(before), 8) is None  # 6 was before
    assert span({1: 1, 2: 9, 3: 1}, lambda before: 2 * max(before), 1) is None


@pytest.fixture
def seen(make_rollout):
    """Make what an update saw of a rollout: its iteration, prompt, answer and reward."""
    places = count()

    def make(iteration: int, prompt: str, answer: str, reward: float, **fields) -> Seen:
        group = f"{iteration}/{prompt}/{prompt}"
        rollout = make_rollout([3], [4, 1], group_id=group, completion=answer, reward=reward)
        rollout.sample_index, rollout.reward_parts = next(places), {"exact": reward}
        rollout.prompt = replace(rollout.prompt, id=prompt, set=fields.pop("set", ""))
        rollout.rows[0].versions = [fields.pop("version", iteration - 1)] * 2
        values = {"mass": 1.0, "advantage": reward - 0.5, "log_weight": 2e-4, "tokens": 2} | fields
        return Seen(rollout, **values)

    return make


@pytest.fixture
def batches(seen):
    """Return six sound iterations: of each prompt a right answer, and a wrong one."""
    prompts = [str(n) for n in range(8)]
    return {
        v: [seen(v, p, *own) for p in prompts for own in ((f"{p} yes", 1.0), (f"{p} no", 0.0))]
        for v in range(1, 7)
    }


def test_sound_iterations_have_no_signature(batches):
    rows = {v: {"policy/lr": 1e-3} for v in batches}
    assert suspicions(batches, rows, 1) == []


def test_a_higher_learning_rate(batches):
    rows = {v: {"policy/lr": 1e-3 if v < 5 else 1e-2} for v in batches}
    found = rate(rows, 1, 6)
    assert (found.cause, found.onset, found.last) == (Cause.RATE, 5, 6)
    assert rate(rows, 6, 6) is None


def change(batches, since, how):
    return {v: [how(s) if v >= since else s for s in own] for v, own in batches.items()}


def test_advantages_of_others(batches):
    found = credit(change(batches, 5, lambda s: replace(s, advantage=-s.advantage)), 1)
    assert (found.onset, found.last, len(found.rollouts)) == (5, 6, 32)


def test_one_rollout_with_most_of_the_advantages(batches):
    batches[4][3] = replace(batches[4][3], mass=60.0)  # of 75
    found = outlier(batches, 1)
    assert (found.onset, found.last) == (4, 4)
    assert found.rollouts == (batches[4][3].rollout.id,)
    assert "has 80% of all absolute advantages" in found.text


def graded(s: Seen, reward: float) -> Seen:
    rollout = replace(s.rollout, reward=reward, reward_parts={"exact": reward})
    return replace(s, rollout=rollout)


def test_a_judge_that_misreads_its_scale(batches):
    tens = change(batches, 5, lambda s: graded(s, 10.0) if s.reward else s)
    found = out_of_range(tens, 1)
    assert (found.cause, found.onset, len(found.rollouts)) == (Cause.RANGE, 5, 16)
    assert found.part is None


def test_a_new_part_of_the_reward(batches):
    """For prompts that had others before; those of a new set bring their own."""

    def rewarded(s: Seen, word: str = "no") -> Seen:
        more = {"format": 3.0 * (word in s.rollout.completion)}
        return replace(s, rollout=replace(s.rollout, reward_parts=s.rollout.reward_parts | more))

    def moved(s: Seen) -> Seen:
        return replace(s, rollout=replace(s.rollout, prompt=replace(s.rollout.prompt, set="new")))

    more = change(batches, 5, rewarded)
    found = out_of_range(more, 1)
    assert (found.cause, found.onset, found.last) == (Cause.RANGE, 5, 6)
    assert found.part == "format"
    assert found.text == "the reward format is 3 for 16 rollouts, and was not there before"
    rare = change(batches, 4, rewarded)
    rare[5] = [rewarded(s, "nobody says this") for s in batches[5]]
    found = out_of_range(rare, 1)  # at first it is not paid in each iteration
    assert (found.onset, found.last, len(found.rollouts)) == (4, 6, 16)
    assert out_of_range({v: list(map(moved, own)) if v == 5 else own for v, own in more.items()
                         if v < 6}, 1) is None  # fmt: skip


def test_a_pattern_that_is_paid(batches):
    paid = change(batches, 5, lambda s: graded(s, float("no" in s.rollout.completion)))
    found = pattern(paid, 1)
    assert (found.cause, found.onset, found.last) == (Cause.PATTERN, 5, 6)
    assert "contain 'no'" in found.text
    assert set(found.rollouts) == {
        s.rollout.id for v in (5, 6) for s in paid[v] if "no" in s.rollout.completion
    }


def test_a_pattern_that_is_seldom_seen_explains_other_rewards(batches, seen):
    paid = dict(batches)
    for v in (4, 5, 6):
        paid[v] = [seen(v, str(n), f"{n} yes", 0.0) for n in range(8)]
        paid[v] += [seen(v, str(n), f"{n} no", 1.0) for n in (0, v)]
    assert pattern(paid, 1) is None  # two in an iteration are too few to tell
    found = {one.cause: one for one in suspicions(paid, {}, 1)}
    told = found[Cause.PATTERN]
    assert (told.onset, told.last, len(told.rollouts)) == (4, 6, 6)
    assert list(found).index(Cause.PATTERN) < list(found).index(Cause.ANSWER)
    others = [seen(6, "7", "7 maybe", 1.0), seen(6, "6", "6 so", 1.0)]
    mixed = paid | {6: [*paid[6], *others]}  # 6 of 8 that earn the most have the pattern
    assert Cause.PATTERN not in {one.cause for one in suspicions(mixed, {}, 1)}


def test_the_same_answers_earn_something_else(batches):
    turned = change(batches, 4, lambda s: graded(s, 1.0 - s.reward))
    found = contradictions(turned, 1)
    assert (found.cause, found.onset, found.last) == (Cause.ANSWER, 4, 6)
    assert found.text.startswith("100% of the answers")


def test_contradictions_of_one_set_are_its_own(batches):
    def of_sets(s: Seen) -> Seen:
        name = "odd" if int(s.rollout.prompt.id) % 2 else "even"
        return replace(s, rollout=replace(s.rollout, prompt=replace(s.rollout.prompt, set=name)))

    def turned(s: Seen) -> Seen:
        return graded(s, 1.0 - s.reward) if s.rollout.prompt.set == "odd" else s

    found = contradictions(change(change(batches, 1, of_sets), 4, turned), 1)
    assert (found.cause, found.onset, len(found.rollouts)) == (Cause.SET, 4, 3 * 8)
    late = new_set(change(batches, 5, of_sets), 1)
    assert (late.cause, late.onset) == (Cause.SET, 5)


def test_older_weights_and_others(batches, seen):
    answers = [(str(n), *own) for n in range(8) for own in (("yes", 1.0), ("no", 0.0))]
    old = batches | {6: [seen(6, *own, version=3) for own in answers]}
    found = stale(old, 1)
    assert (found.cause, found.onset) == (Cause.STALE, 6)
    assert "up to 2 versions old" in found.text
    apart = change(batches, 5, lambda s: replace(s, log_weight=-0.4))
    assert (gap(apart, 1).cause, gap(apart, 1).onset) == (Cause.GAP, 5)
    both = change(old, 6, lambda s: replace(s, log_weight=-0.4))
    assert [one.cause for one in suspicions(both, {}, 1)] == [Cause.STALE]  # which explains the gap


def test_the_page_has_no_code_of_the_model(batches):
    hostile = graded(batches[1][0], 1.0)
    hostile.rollout.completion = "<script>alert(1)</script>"
    comparison = Comparison.of({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0})
    told = Suspicion(Cause.PATTERN, 3, 4, "<b>", (hostile.rollout.id,))
    verdict = Bisection(
        "eval/accuracy", {0: 0.5, 4: 0.25}, Window(0, 4), comparison, 3, told, 4, comparison,
        [hostile], 0.5,
    )  # fmt: skip
    page = page_of(verdict, "<run>")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "eval/accuracy drops with iteration 3: reward paid a pattern" in page
    assert "they are 50% of the absolute advantages" in page


def test_options_that_do_not_go_together(capsys):
    for options, words in (
        (["--good", "3"], "--good and --bad belong together"),
        (["--good", "3", "--bad", "3"], "--good 3 must be < --bad 3"),
        (["--budget", "soon"], "--budget='soon' must be a duration above 0"),
        (["--budget", "0m"], "--budget='0m' must be a duration above 0"),
    ):
        assert main(["bisect", "somewhere", *options]) == 2
        assert words in capsys.readouterr().err
