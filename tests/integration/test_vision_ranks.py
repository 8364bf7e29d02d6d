"""Two processes learn from pictures as one does: weights, gradients or packs are shared."""

from functools import cache

import pytest

from tests.support.ranks_run import ITERATIONS
from tests.support.ranks_vision import STRATEGIES, WAYS, see
from tests.support.tiny_vision import save_vision_model
from tests.support.two_ranks import TOLERANCE, comparable, run_two


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    return run_two("tests.support.ranks_vision", model, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return cache(lambda way: see(str(model), folder / way, **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_see_as_one(results, alone, strategy, way):
    one, two = alone(way), results(f"{strategy}_{way}")
    assert len(one["rows"]) == len(two[0]["rows"]) == ITERATIONS + 1
    assert two[0]["start"] == pytest.approx(one["start"], rel=TOLERANCE)
    for expected, row in zip(one["rows"], two[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    assert one["rows"][-1]["policy/kl_old"] > 0
    # What is frozen is gathered and pushed once.
    first, *later = two[0]["left_out"]
    assert first == 0
    assert later == one["left_out"][1:]
    assert all(later) == (way != "tower")
