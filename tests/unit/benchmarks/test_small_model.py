"""Test what the benchmark of recipes/smollm2 calculates, and the page from the kept result."""

import math

import pytest

from benchmarks.small_model.figures import accuracy, gain
from benchmarks.small_model.runs import TRAINED


def exam(*of_each_task):
    return {"right": dict(zip(TRAINED, of_each_task, strict=True))}


def test_each_task_counts_as_much():
    one = exam([1.0], [0.0, 0.0, 0.0, 1.0], [0.0], [1.0], [0.0])
    assert accuracy(one) == pytest.approx((1 + 0.25 + 0 + 1 + 0) / 5)
    assert accuracy(one, ["largest"]) == 0.25


def test_the_interval_is_over_questions_and_seeds():
    before = exam([0.0], [0.0], [0.0], [1.0], [0.0])
    seeds = [
        exam([1.0], [1.0], [0.0], [1.0], [0.0]),
        exam([1.0], [1.0], [1.0], [1.0], [0.0]),
        exam([1.0], [1.0], [0.0], [0.0], [0.0]),
    ]
    mean, half = gain(before, seeds)
    # By question: 1, 1, 1/3, -1/3, 0; by seed: 2/5, 3/5, 1/5.
    assert mean == pytest.approx(0.4)
    questions = [0.6, 0.6, 1 / 3 - 0.4, -1 / 3 - 0.4, -0.4]
    of_questions = sum(x * x for x in questions) / 4 / 5
    of_seeds = (0.2**2 + 0.2**2) / 2 / 3
    assert half == pytest.approx(math.sqrt(1.96**2 * of_questions + 4.303**2 * of_seeds))
