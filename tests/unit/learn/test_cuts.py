"""Gradients and metrics do not depend on how the rows of a step are cut into batches.

Every supervised learner trains the same rows in float64, in one batch or in several that are
accumulated; the last window of an epoch is shorter, and so is its last batch. What ranks change is
for tests/integration/test_ddp_supervised.py.
"""

import json
import math

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback

import lightning_rl as rl
from lightning_rl.algos.objective import PromptMean, SequenceMean, TokenMean, TokenSum
from lightning_rl.data.sources import IterablePrompts
from tests.support.small_run import trainer_of
from tests.support.supervised import LEARNERS, doubling

ROWS, STEP = 14, 8  # an epoch has a step of 8 rows and one of 6
CUTS = {"one": (8, 1), "two": (4, 2), "uneven": (3, 2), "single": (1, 8)}
"""``batch_size`` and ``accumulate_grad_batches``; of the uneven cut steps have 6, 6 and 2 rows."""


def run(kind, model, tmp_path, batch_size, accumulate, callbacks=(), **options):
    """Run; return metrics by iteration, and the weights at the end."""
    torch.manual_seed(0)  # a reward model's head is drawn
    module, data = LEARNERS[kind](model, ROWS, batch_size, **options)
    rows = {}
    seen = LambdaCallback()
    seen.on_iteration_end = lambda trainer, pl_module, row: rows.setdefault(
        pl_module.iteration, {}
    ).update(row)
    trainer = trainer_of(
        tmp_path, [seen, doubling(), *callbacks], logger=False, max_epochs=2,
        accumulate_grad_batches=accumulate, num_sanity_val_steps=2,
    )  # fmt: skip
    trainer.fit(module, data)
    return rows, {name: p.detach().clone() for name, p in module.named_parameters()}


def require_same(ours, theirs, within=1e-9):
    """Require the same metrics and weights, but for rounding in float64."""
    (rows, weights), (expected, wanted) = ours, theirs
    assert rows.keys() == expected.keys()
    for number, row in expected.items():
        assert rows[number] == pytest.approx(row, rel=within, abs=within), number
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, rtol=within, atol=within)


@pytest.mark.parametrize("cut", ["two", "single"])
@pytest.mark.parametrize("kind", LEARNERS)
def test_one_big_batch_and_several_small_ones_are_the_same_step(
    tiny_model, tmp_path, in_double, kind, cut
):
    whole = run(kind, tiny_model, tmp_path, *CUTS["one"])
    assert sorted(whole[0]) == [1, 2, 3, 4]
    assert {f"{kind}/loss", f"{kind}/grad_norm", f"{kind}/val_loss"} <= whole[0][2].keys()
    require_same(run(kind, tiny_model, tmp_path, *CUTS[cut]), whole)


@pytest.mark.parametrize(
    "aggregation", [TokenMean(), SequenceMean(), PromptMean(), TokenSum(6)], ids=repr
)
def test_every_aggregation_counts_the_whole_step(tiny_model, tmp_path, in_double, aggregation):
    whole = run("sft", tiny_model, tmp_path, *CUTS["one"], aggregation=aggregation)
    parts = run("sft", tiny_model, tmp_path, *CUTS["two"], aggregation=aggregation)
    require_same(parts, whole, within=4e-6)  # weights such as a third are float32 numbers


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_short_last_window_counts_as_what_it_has(tiny_model, tmp_path, in_double, kind):
    parts, whole = CUTS["uneven"], (6, 1)
    require_same(run(kind, tiny_model, tmp_path, *parts), run(kind, tiny_model, tmp_path, *whole))


def test_a_schedule_of_accumulation_is_followed(tiny_model, tmp_path, in_double):
    """The steps have 8 rows in the first epoch, and 4 in the second."""
    schedule = GradientAccumulationScheduler({0: 2, 1: 1})
    ours, _ = run("sft", tiny_model, tmp_path, 4, 1, [schedule])
    assert sorted(ours) == [1, 2, 3, 4, 5, 6]
    other = GradientAccumulationScheduler({0: 4, 1: 2})
    require_same(
        run("sft", tiny_model, tmp_path, 2, 1, [other]),
        run("sft", tiny_model, tmp_path, 4, 1, [schedule]),
    )


def test_the_held_out_loss_is_the_mean_over_all_tokens(tiny_model, tmp_path, in_double):
    """One row of 5 tokens and 3 of 2 are 11 tokens, in batches of 3 and 1."""
    rows = [{"prompt": "1=", "completion": text} for text in ("2222", "3", "4", "5")]
    module = rl.SFTModule(str(tiny_model), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    data = rl.SFTDataModule(IterablePrompts(rows), IterablePrompts(rows), batch_size=3)
    trainer = trainer_of(tmp_path, [doubling()], logger=False)
    trainer.fit(module, data)
    total, tokens = 0.0, 0
    batches = [module.sums(data.collate([row])) for row in data.rows(data.train)]
    for sums in batches:
        total, tokens = total + float(sums["loss"][0]), tokens + float(sums["loss"][1])
    assert tokens == 11
    assert float(trainer.callback_metrics["sft/val_loss"]) == pytest.approx(
        total / tokens, rel=1e-6
    )
    found = trainer.validate(module, data)[0]["sft/val_loss"]
    assert found == pytest.approx(total / tokens, rel=1e-6)


def test_a_run_leaves_a_row_for_each_step_and_a_report(tiny_model, tmp_path):
    module, data = LEARNERS["sft"](tiny_model, ROWS, 4)
    trainer_of(tmp_path, logger=False).fit(module, data)
    place = tmp_path / "lightning_rl_runs" / "version_0"
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 4]  # and a validation
    assert rows[0]["sft/loss"] == pytest.approx(math.log(16), rel=0.5)
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 4)
    assert (place / "curves.png").exists()
