"""Packs with pictures that processes compute together: numbers and gradients are one's."""

import pytest

from tests.support.ranks_seeing import WAYS
from tests.support.tiny_vision import FAMILIES, save_vision_model
from tests.support.two_ranks import run_two

OF_TWO = [*(f"{family}_{way}" for family in FAMILIES for way in WAYS), "one_sees", "none_sees"]
OF_FOUR = ["four_qwen2_5_vl", "four_qwen3_vl"]


@pytest.fixture(scope="module")
def two(folder):
    return _started(folder / "two", OF_TWO, 2)


@pytest.fixture(scope="module")
def four(folder):
    """More than the models have heads."""
    return _started(folder / "four", OF_FOUR, 4)


def _started(folder, scenarios, ranks):
    for family in FAMILIES:
        save_vision_model(folder / "models" / family, family)
    module = "tests.support.ranks_seeing"
    return run_two(module, folder / "models", folder, *scenarios, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [*(("two", scenario) for scenario in OF_TWO), *(("four", scenario) for scenario in OF_FOUR)],
)
def test_shared_packs_that_see(request, ranks, scenario):
    for result in request.getfixturevalue(ranks)(scenario):
        assert result["numbers"] >= 12
        assert result["gradient"] > 0.1
        assert result["scores"] < 1e-12
        assert result["gradients"] < 1e-11 * max(1.0, result["gradient"])
