"""A run that was interrupted ends as one that was not: whatever runs, and wherever it stopped.

Each kind of run is made once without interruption, leaves checkpoints on its way, and is resumed
from them. How a run is stopped (signals, full disks, SIGKILL) is for test_stops.py and
test_kill.py; runs on several processes are for test_ddp_resume.py.

Slow: every kind of run trains once whole, and once more from each checkpoint.
"""

import json
import random
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import AsyncCollector
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.partial import (
    PartialCollector,
    PartialTailCollector,
    TailBatchingCollector,
)
from lightning_rl.collect.prefetch import OneStepOffCollector
from lightning_rl.data.rollouts.store import RolloutStore
from tests.support.architectures import UNPACKED, saved
from tests.support.resumed import (
    ITERATIONS,
    TRAINED,
    Saves,
    require_same_end,
    resume,
    run_case,
)
from tests.support.resumed_cases import CASES, PER_EPOCH, SLOW, SMALL, STREAMED, ahead
from tests.support.small_run import numbers
from tests.support.tiers import slow
from tests.support.tiny_vision import save_vision_model
from tests.support.tolerances import rounding


@pytest.fixture(scope="module")
def unpacked_model(tmp_path_factory):
    return saved(UNPACKED["lfm2"](), tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """Return the run of a kind that nothing interrupts, made once."""

    @cache
    def run(name):
        case = CASES[name]
        place = tmp_path_factory.mktemp("whole") / "run"
        return run_case(case, request.getfixturevalue(case.model), place, Saves())

    return run


@pytest.mark.parametrize(
    ("name", "place"),
    [
        slow(name, place) if name in SLOW else (name, place)
        for name, case in CASES.items()
        for place in case.places
    ],
)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(request, whole, tmp_path, name, place):
    case, expected = CASES[name], whole(name)
    model = request.getfixturevalue(case.model)
    resumed = resume(case, model, expected, f"{place}.ckpt", tmp_path / "resumed")
    require_same_end(resumed, expected, TRAINED[place])
    if (file := resumed.place / "groups.sqlite").exists():  # without what was undone
        whole_file = expected.place / "groups.sqlite"
        assert len(RolloutStore(file).groups()) == len(RolloutStore(whole_file).groups())


def test_mixtures_and_curricula_have_learned_something_to_lose(whole):
    rows = whole("mixture").trace.rows
    assert rows[ITERATIONS]["data/b/share"] != 0.5
    replaying = whole("replay and curriculum")
    assert (replaying.data.train_prompts.pass_rates != 0.5).any()
    assert replaying.trace.rows[ITERATIONS]["buffer/replayed_share"] == 0.4


def test_a_run_resumed_after_an_epoch_goes_on_exactly(whole, tiny_model, tmp_path):
    """A run that is over and is made longer, from Lightning's own checkpoint."""
    saver = ModelCheckpoint(tmp_path, filename="epoch", every_n_epochs=1)
    options = {"max_epochs": 1, "enable_checkpointing": True}
    run_case(CASES["ppo"], tiny_model, tmp_path / "run", saver, **options)
    resumed = run_case(
        CASES["ppo"], tiny_model, tmp_path / "run", seed=9, ckpt_path=tmp_path / "epoch.ckpt"
    )
    assert resumed.module.iteration == ITERATIONS
    require_same_end(resumed, whole("ppo"), PER_EPOCH)


def test_a_seeded_run_is_the_same_whatever_the_global_random_state(whole, tiny_model, tmp_path):
    random.seed(123)
    again = run_case(CASES["grpo"], tiny_model, tmp_path / "again", seed=123)
    expected = whole("grpo")
    assert again.trace.rollouts == expected.trace.rollouts
    for name, weight in expected.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], weight), name


# ---------------------------------------------------------------- not to the bit


@pytest.mark.parametrize("case", STREAMED, ids=["text", "pictures"])
def test_a_streamed_run_ends_the_same_but_for_rounding(request, tmp_path, case):
    model = request.getfixturevalue(case.model)
    whole = run_case(case, model, tmp_path / "whole", Saves())
    resumed = resume(case, model, whole, "within.ckpt", tmp_path / "resumed")
    for place, row in resumed.trace.rows.items():
        assert row.keys() == whole.trace.rows[place].keys()
    assert max(row["policy/streamed_share"] for row in resumed.trace.rows.values()) > 0
    expected = whole.module.state_dict()
    for name, weight in resumed.module.state_dict().items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            weight, expected[name], rtol=0, atol=rounding(additions=1_500, magnitude=scale)
        )


@pytest.mark.parametrize(
    "make",
    [
        slow(SyncCollector), lambda: AsyncCollector(2), slow(OneStepOffCollector),
        PartialCollector, slow(lambda: PartialTailCollector(trigger_size=1)),
        TailBatchingCollector,
        slow(lambda: TailBatchingCollector(trigger_size=1, candidate_step=2)),
    ],
)  # fmt: skip
def test_a_resumed_run_trains_on_no_prompt_twice_and_skips_none(tiny_model, tmp_path, make):
    case = ahead(make)
    whole = run_case(case, tiny_model, tmp_path / "whole", Saves())
    resumed = resume(case, tiny_model, whole, "within.ckpt", tmp_path / "resumed")
    assert resumed.module.iteration == ITERATIONS
    done = TRAINED["within"]
    batches = {n: whole.trace.rollouts[n] for n in range(done)} | resumed.trace.rollouts
    assert list(batches) == list(range(ITERATIONS))
    trained = [r["prompt"]["prompt"] for batch in batches.values() for r in batch]
    trained = trained[:: SMALL["group_size"]]
    assert len(trained) == len(set(trained)) == ITERATIONS * SMALL["groups_per_iteration"]
    state = json.loads(json.dumps(resumed.data.collection.state_dict()))["collector"]
    waiting = [group[0]["prompt"]["prompt"] for group in state["groups"]]
    waiting += [prompt["prompt"] for prompt in state.get("tail", [])]
    drawn = numbers(100, 180, seed=1)
    drawn.load(resumed.data._tokenizer)
    count = len(trained + waiting)
    assert sorted(trained + waiting) == sorted(p.prompt for p in drawn.draw(count))
    ages = [
        iteration - version
        for iteration, batch in batches.items()
        for rollout in batch
        for row in rollout["rows"]
        for version in row["versions"]
    ]
    assert 0 <= min(ages) <= max(ages) <= getattr(resumed.data.collector, "max_staleness", 0)
    if type(resumed.data.collector) is AsyncCollector:  # others count what came late, if any
        keys = {n: sorted(row) for n, row in resumed.trace.rows.items()}
        assert keys == {n: sorted(whole.trace.rows[n]) for n in keys}
