"""Two processes that learn from fixed rows are one: loss, gradient, metrics and place."""

import pytest
import torch

from tests.support.ranks_supervised import EPOCHS, trained
from tests.support.supervised import LEARNERS
from tests.support.tiers import slow


def require_same(ours, theirs):
    """Require the same rows of metrics and weights, but for rounding in float64."""
    assert ours["rows"].keys() == theirs["rows"].keys()
    for number, row in theirs["rows"].items():
        assert ours["rows"][number] == pytest.approx(row, rel=1e-9, abs=1e-9), number
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(
            torch.tensor(ours["weights"][name], dtype=torch.float64),
            torch.tensor(weight, dtype=torch.float64),
            rtol=1e-8, atol=1e-8, msg=name,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["sft", slow("dpo"), "kto", slow("rm")])
def test_two_processes_take_the_steps_of_one(together, tiny_model, kind):
    """The steps have 8 and 5 rows: one batch, two of two processes, or four accumulated of two.

    The last batches of the second cut have 1 row for two processes, so one has none.
    """
    assert kind in LEARNERS
    whole = together.alone(trained, str(tiny_model), kind, 8, 1)
    assert list(whole["rows"]) == list(range(1, 2 * EPOCHS + 1))
    for batch_size, accumulate in ((4, 1), (2, 2)):
        for rank in together(2, trained, str(tiny_model), kind, batch_size, accumulate):
            require_same(rank, whole)


def test_a_run_resumes_on_another_number_of_processes(together, tiny_model):
    """Saved by two within the second step, of batches of 2 rows each; one goes on with 4."""
    whole = together.alone(trained, str(tiny_model), "sft", 4, 2)
    saved = together(2, trained, str(tiny_model), "sft", 2, 2, save_at=1)[0]
    path = str(saved["where"] / "saved.ckpt")
    for resumed in (
        together.alone(trained, str(tiny_model), "sft", 4, 2, ckpt_path=path),
        together(2, trained, str(tiny_model), "sft", 2, 2, ckpt_path=path)[0],
    ):
        rows = {n: row for n, row in whole["rows"].items() if n >= 2}
        require_same(resumed, whole | {"rows": rows})
