"""Two processes learn from pictures as one does: weights, gradients or micro-batches are shared."""

import pytest

from tests.support.ranks_run import ITERATIONS
from tests.support.ranks_vision import LAYOUTS, WAYS, see
from tests.support.tiny_vision import save_vision_model
from tests.support.two_ranks import require_same_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_two_processes_see_as_one(together, model, layout, way):
    one, two = together.alone(see, model, way), together(2, see, model, way, layout)
    assert len(one["rows"]) == ITERATIONS + 1
    require_same_run(one, two)
    # What is frozen is gathered and pushed once.
    first, *later = two[0]["left_out"]
    assert first == 0
    assert later == one["left_out"][1:]
    assert all(later) == (way != "tower")
