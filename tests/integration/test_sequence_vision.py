"""Packs with pictures that two processes compute together: numbers and gradients are one's."""

import pytest

from tests.support.ranks_seeing import WAYS
from tests.support.tiny_vision import FAMILIES, save_vision_model
from tests.support.two_ranks import run_two

SCENARIOS = [*(f"{family}_{way}" for family in FAMILIES for way in WAYS), "one_sees", "none_sees"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for family in FAMILIES:
        save_vision_model(folder / "models" / family, family)
    return run_two("tests.support.ranks_seeing", folder / "models", folder)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_shared_packs_that_see(results, scenario):
    for result in results(scenario):
        assert result["numbers"] >= 12
        assert result["gradient"] > 0.1
        assert result["scores"] < 1e-12
        assert result["gradients"] < 1e-11 * max(1.0, result["gradient"])
