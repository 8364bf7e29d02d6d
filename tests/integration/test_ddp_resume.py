"""Runs of two processes go on: with two, with one, and those of one with two."""

import math
import os
from shutil import copytree

import pytest
import torch

from lightning_rl.errors import CheckpointError
from lightning_rl.run.files.checkpoint_io import newest_good, require_good
from tests.support.ranks_run import GROUP_SIZE, GROUPS
from tests.support.ranks_settings import failing, trained
from tests.support.two_ranks import (
    TOLERANCE,
    checkpoint_of,
    comparable,
    require_same_rollouts,
    require_same_rows,
)

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def one(together, tiny_model):
    """Return a run on one process, or the rest of one."""
    return lambda names, **options: together.alone(trained, str(tiny_model), names, **options)


@pytest.fixture(scope="session")
def two(together, tiny_model):
    """Return a run on two processes, or the rest of one."""
    return lambda names, strategy, ranks=2, **options: together(
        ranks, trained, str(tiny_model), names, strategy, **options
    )


def at(run, iteration):
    return str(checkpoint_of(run, f"iteration_{iteration}.ckpt"))


@pytest.mark.parametrize(
    ("names", "strategy", "done", "layout"),
    [
        ("saved", "ddp", 3, {}),
        pytest.param("saved eight_bits", "ddp", 3, {}, marks=slow),
        pytest.param("saved", "fsdp", 3, {}, marks=slow),
        pytest.param("saved", "fsdp", 2, {"save_distributed_checkpoint": True}, marks=slow),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(two, names, strategy, done, layout):
    ranks = two(names, strategy, **layout)
    going_on = two(names, strategy, ckpt_path=at(ranks[0], done), **layout)
    for whole, rest in zip(ranks, going_on, strict=True):
        assert len(whole["rollouts"]) == 4
        assert rest["rollouts"] == whole["rollouts"][done:]
        for expected, row in zip(whole["rows"][done + 1 :], rest["rows"][1:], strict=True):
            assert comparable(row) == comparable(expected)
            assert math.isfinite(row["policy/loss"])


# -------------------------------------------------------------------- another number of processes


def require_rest(rest, whole, done, tolerance=TOLERANCE):
    """Require that a resumed run did after ``done`` iterations what the whole run did then."""
    expected = whole["rollouts"][done:]
    require_same_rollouts(expected, [rank["rollouts"] for rank in rest])
    left = len(expected)  # before these there may be a row of the first sync
    require_same_rows(whole["rows"][-left:], rest[0]["rows"][-left:], tolerance)


@pytest.mark.parametrize(
    ("names", "strategy"),
    [
        ("saved", "ddp"),
        pytest.param("saved shared", "ddp", marks=slow),
        pytest.param("saved", "fsdp", marks=slow),
    ],
)
def test_two_processes_go_on_with_what_one_had_collected(
    one, two, together, tiny_model, names, strategy
):
    stopped = together.alone(failing, str(tiny_model), "saved stops")
    assert (stopped["error"], stopped["message"]) == ("LightningRLError", "stopped")
    ranks = two(names, strategy, ckpt_path=at(stopped, 2))
    assert [len(rank["rollouts"][0]) for rank in ranks] == [GROUPS * GROUP_SIZE // 2] * 2
    require_rest(ranks, one("saved"), 2)


@pytest.mark.parametrize(
    ("names", "strategy", "done", "layout", "then"),
    [
        ("saved", "ddp", 3, {}, "one"),
        pytest.param("saved replay", "ddp", 2, {}, "one", marks=slow),
        pytest.param("saved", "fsdp", 3, {}, "one", marks=slow),
        pytest.param("saved", "fsdp", 2, {"save_distributed_checkpoint": True}, "fsdp", marks=slow),
    ],
)
def test_one_process_goes_on_where_two_stopped(one, two, names, strategy, done, layout, then):
    run = two(names, strategy, **layout)[0]
    options = {"ckpt_path": at(run, done)}
    if "replay" in names:
        options["where"] = run["where"]  # the buffer is there
    rest = [one(names, **options)] if then == "one" else two(names, then, 1, **options)
    # Importance weights, of which some are above 6 here, are larger than logprobs, errors too.
    require_rest(rest, one(names), done, 6 * TOLERANCE if "replay" in names else TOLERANCE)


@slow
def test_one_process_goes_on_with_what_two_were_generating(one, two):
    """Prefetching, rollouts depend on time; but no prompt is lost or trained on twice."""
    ranks = two("saved ahead", "ddp")
    path = at(ranks[0], 2)
    rest = one("saved stale_ahead", ckpt_path=path)
    batches = [*ranks[0]["rollouts"][:2], *ranks[1]["rollouts"][:2], *rest["rollouts"]]
    done = [rollout[0] for batch in batches for rollout in batch]
    assert len(set(done)) == len(done) == 4 * GROUPS * GROUP_SIZE
    state = torch.load(path, weights_only=True)["RLDataModule"]["loader"]["ranks"]
    waiting = {g[0]["group_id"] for s in state for g in s["source"]["collector"]["groups"]}
    assert waiting  # something was in flight or done
    assert waiting <= {name.rpartition("/")[0] for name in done}
    prompts = [name.split("/")[2] for name in done[::GROUP_SIZE]]
    assert len(set(prompts)) == len(prompts)
    assert all(row["rollout/staleness_max"] <= 1 for row in rest["rows"][1:])


# ------------------------------------------------------------------------------ folders, by "last"


@pytest.fixture
def stopped_folders(together, tiny_model, tmp_path):
    """Copy a run whose checkpoints are folders, and that failed in its third iteration."""
    layout = {"save_distributed_checkpoint": True}
    for run in together(2, failing, str(tiny_model), "saved stops", "fsdp", **layout):
        assert (run["error"], run["message"]) == ("LightningRLError", "stopped")
    return {"where": copytree(run["where"], tmp_path / "run", symlinks=True)}


@slow
@pytest.mark.parametrize("ranks", [2, 4, 1])
def test_last_goes_on_from_a_folder_on_any_number_of_processes(stopped_folders, one, two, ranks):
    options = {"where": stopped_folders["where"], "save_distributed_checkpoint": True}
    rest = two("saved", "fsdp", ranks, ckpt_path="last", **options)
    assert [len(rank["rollouts"]) for rank in rest] == [2] * ranks
    require_rest(rest, one("saved"), 2)
    saved = checkpoint_of(stopped_folders, "last.ckpt").parent
    assert {path.name for path in saved.iterdir() if path.is_dir() and not path.is_symlink()} == {
        f"iteration_{n}.ckpt" for n in (1, 2, 3, 4)
    }
    assert os.readlink(saved / "last.ckpt") == "iteration_4.ckpt"
    shards = len(list((saved / "iteration_4.ckpt").glob("*.distcp")))
    assert shards == ranks


@slow
def test_last_passes_over_a_folder_that_is_not_whole(stopped_folders):
    newest = checkpoint_of(stopped_folders, "iteration_2.ckpt")
    before = newest.with_name("iteration_1.ckpt")
    assert newest_good(newest.parent) == newest
    shard = newest / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(
        UserWarning, match=r"iteration_2.ckpt is damaged: its __1_0.distcp has \d+ of"
    ):
        assert newest_good(newest.parent) == before
    with pytest.raises(CheckpointError, match=f"use {before}"):
        require_good(newest)
    (before / "meta.pt").unlink()
    with pytest.raises(CheckpointError, match=r"the folder lacks meta\.pt, so it was not written"):
        newest_good(newest.parent)


@slow
def test_shards_are_for_strategies_that_shard(stopped_folders, one):
    path = str(checkpoint_of(stopped_folders, "iteration_2.ckpt"))
    with pytest.raises(CheckpointError, match="folder of shards, which only ModelParallelStrategy"):
        one("saved", ckpt_path=path)
