"""Test how two recordings of a run are compared: rollouts by meaning, and bits by value."""

import json
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from benchmarks.same_runs.compare import compare, differences, meaning
from benchmarks.same_runs.recorder import digests, leaves
from benchmarks.same_runs.runs import RUNS
from lightning_rl.data.rollouts.jsonl import JSONLRollouts
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.rollout import Call, Prompt, Rollout, RolloutStatus, Row

SAMPLED = Rollout(
    prompt=Prompt("3", "ab", [5, 6]),
    group_id="1/3",
    sample_index=0,
    seed=17,
    rows=[
        Row([5], [7, 8], [True, False], [-0.5, 0.0], [0, -1]),
        Row([5], [9], [True], [-0.25], [0], "other"),
    ],
    status=RolloutStatus.COMPLETED,
    reward=1.0,
    calls=[Call(0, 0, 1, seed=17), Call(1, 0, 1, seed=18)],
)
FIRST, FURTHER = SAMPLED.rows
WEIGHTS = {"a": torch.zeros(2), "b": torch.ones(2)}


def recorded(folder, rollout=SAMPLED, weights=WEIGHTS, metrics=None, batch=None):
    """Return a recording of one iteration, as a run leaves it."""
    folder.mkdir()
    (folder / "prepared.json").write_text("{}")
    row = {"batch": digests(batch or {}), "metrics": metrics or {"reward/mean": 1.0}}
    (folder / "rank0.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "rank0.json").write_text(json.dumps({"weights": digests(weights)}))
    if rollout is not None:
        RerunLog(folder).write_rollouts(1, 0, [rollout])
    return folder


def first(**changes):
    """Return the first row with other values."""
    return {"rows": [replace(FIRST, **changes), FURTHER]}


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        (first(token_ids=[7, 4]), "rows[0]/token_ids[1]: 8 before, 4 after"),
        (first(loss_mask=[True, True]), "rows[0]/loss_mask[1]"),
        (first(logprobs=[-0.5000001, 0.0]), "rows[0]/logprobs[0]"),
        ({"rows": [FIRST], "calls": [Call(0, 0, 1, seed=17)]}, "/rows: ["),
        ({"reward": 0.5}, "reward: 1.0 before, 0.5 after"),
        ({"seed": 18}, "seeds[0]"),
        ({"calls": [Call(0, 0, 1, seed=17), Call(1, 0, 1, seed=19)]}, "calls[1][3]: 18 before, 19"),
    ],
)
def test_a_rollout_that_says_something_else_is_a_difference(tmp_path, changed, place):
    before = recorded(tmp_path / "before")
    assert differences(before, recorded(tmp_path / "same")) == []
    found = differences(before, recorded(tmp_path / "after", replace(SAMPLED, **changed)))
    assert place in found[0], found


def test_notes_in_place_of_calls_say_nothing():
    noted = replace(SAMPLED, calls=[*SAMPLED.calls, Call(0, 0, 0)], extra={"session_id": "x"})
    assert meaning(noted) == meaning(SAMPLED)


def test_staged_interactions_are_told_by_their_ids_not_by_who_was_first(tmp_path):
    other = replace(SAMPLED, sample_index=1, seed=18)
    folders = []
    for name, order in (("before", [SAMPLED, other]), ("after", [other, SAMPLED])):
        folders.append(recorded(tmp_path / name, None))
        JSONLRollouts(folders[-1] / "rollouts.jsonl").append(order, 0, {})
    assert differences(*folders) == []
    JSONLRollouts(folders[1] / "tests.jsonl").append([other], 0, {})
    assert len(differences(*folders)) == 1


def test_weights_are_compared_bit_by_bit_whatever_they_are_called(tmp_path):
    before = recorded(tmp_path / "before")
    moved = {"part.a": WEIGHTS["a"], "b": WEIGHTS["b"]}
    assert differences(before, recorded(tmp_path / "moved", weights=moved)) == []
    # -0.0 equals 0.0, and has other bits.
    bits = {"a": torch.tensor([0.0, -0.0]), "b": WEIGHTS["b"]}
    assert "weights/rank0/a" in differences(before, recorded(tmp_path / "bits", weights=bits))[0]
    lost = differences(before, recorded(tmp_path / "lost", weights={"a": WEIGHTS["a"]}))
    assert lost[0].endswith("before, None after")


def test_metrics_but_times_are_compared(tmp_path):
    nan = float("nan")
    first = recorded(
        tmp_path / "a",
        metrics={"x": nan, "time/train": 1.0, "sync/a/seconds": 1, "rollout/tokens_per_s": 1},
    )
    same = recorded(
        tmp_path / "b",
        metrics={"x": nan, "time/train": 2.0, "sync/a/seconds": 2, "rollout/tokens_per_s": 2},
    )
    other = recorded(tmp_path / "c", metrics={"x": 1.0})
    assert differences(first, same) == []
    assert differences(first, other) == ["c/metrics/rank0[0]/x: nan before, 1.0 after"]


def test_batches_are_compared_where_there_are_no_rollouts(tmp_path):
    batches = [
        leaves(TensorDict({"steps": {"reward": torch.tensor([r])}}, [1])) for r in (1.0, 2.0)
    ]
    for name, rollout, count in (("steps", None, 1), ("tokens", SAMPLED, 0)):
        pair = [
            recorded(tmp_path / f"{name}{number}", rollout, batch=batch)
            for number, batch in enumerate(batches)
        ]
        assert len(differences(*pair)) == count


def test_a_run_that_is_missing_is_a_difference(tmp_path, capsys):
    recorded(tmp_path / "sac")
    assert compare(tmp_path, tmp_path, ["sac"]) == 0
    assert compare(tmp_path, tmp_path, ["sac", "staged"]) == 2
    assert "staged is not there" in capsys.readouterr().out
    assert {"sac", "protocol", "program", "staged"} <= RUNS.keys()
