"""Test benchmarks.growth.fits: it finds the exponents of numbers whose law is known."""

import math

import pytest

from benchmarks.growth.fits import Cost, bytes_of, exponent, measured, summary

SIZES = [4**n for n in range(6)]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_a_power_is_found_whatever_its_factor(power):
    assert exponent(SIZES, [0.003 * size**power for size in SIZES]) == pytest.approx(power)


def test_constants_are_left_out_and_what_begins_late_is_not():
    # This is a third of the cost at 64, and hides an eighth of the slope.
    assert 0.85 < exponent(SIZES, [30 + size for size in SIZES]) < 1
    late = [size + size**2 / 100 for size in SIZES]  # quadratic from 100 on
    assert 1.5 < exponent(SIZES, late) < 2


def test_the_slope_is_that_of_least_squares():
    # log2: x = 0, 1, 2, y = 0, 1, 4, so the slope is (-1 * -5/3 + 0 + 1 * 7/3) / 2 = 2.
    assert exponent([1, 2, 4], [1, 2, 16]) == pytest.approx(2)
    # Sizes may come in any order, and of four only the upper three count.
    assert exponent([4, 2, 8, 1], [4, 2, 8, 1000]) == pytest.approx(1)


@pytest.mark.parametrize(("sizes", "costs"), [([1, 2], [1, 2]), ([1, 2, 3], [1, 2])])
def test_too_little_is_refused(sizes, costs):
    with pytest.raises(ValueError, match="need three or more"):
        exponent(sizes, costs)


def test_what_is_measured_is_the_work_and_not_its_preparation():
    made = []

    def prepare(size):
        bytearray(10**6)
        return lambda: made.append(bytearray(1000 * size))

    assert bytes_of(prepare(100)) == pytest.approx(10**5, rel=0.05)
    found = measured(Cost("bytes", [100, 200, 400], prepare, memory=True), repeats=2)
    assert len(made) == 1 + 3 * 2 + 3
    assert found["memory"] == pytest.approx(1, abs=0.05)
    assert math.isfinite(found["time"])


def test_the_worst_is_named():
    costs = {"a": {"time": 1.0}, "b": {"time": 0.9, "memory": 1.3}}
    told = summary(costs)
    assert (told["worst_exponent"], told["worst"]) == (1.3, "b_memory")
    assert told["exponents"] == {"a_time": 1.0, "b_time": 0.9, "b_memory": 1.3}
