"""Runs of two processes go on: with two, with one, and those of one with two."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_rl.collect.ahead import AsyncCollector
from lightning_rl.errors import CheckpointError, LightningRLError
from lightning_rl.run.checkpoint_io import newest_good, require_good
from tests.support.ranks_resume import StopsWhenCollected, checkpoint_of, gone_on, saved
from tests.support.ranks_run import GROUP_SIZE, GROUPS, replaying
from tests.support.two_ranks import SECONDS, TOLERANCE, Results, comparable, run_two


@pytest.fixture(scope="module")
def stopped(tiny_model, folder) -> None:
    """A run on one process that ended with a batch in hand, for two to go on with."""
    with pytest.raises(LightningRLError, match=r"^stopped$"):
        saved(str(tiny_model), folder / "alone" / "stopped", "auto", StopsWhenCollected())


@pytest.fixture(scope="module")
def results(tiny_model, folder, stopped) -> Results:
    return run_two("tests.support.ranks_resume", tiny_model, folder)


@pytest.fixture(scope="module")
def alone(tiny_model, folder) -> Callable[[bool], dict[str, Any]]:
    """The whole run on one process; with a replay buffer if so asked."""

    @cache
    def run(replays: bool) -> dict[str, Any]:
        where = folder / "alone" / f"whole_{replays}"
        return saved(str(tiny_model), where, "auto", **(replaying(where) if replays else {}))

    return run


@pytest.mark.parametrize(
    ("scenario", "trained"),
    [("resume_ddp", 3), ("resume_8bit", 3), ("resume_fsdp", 3), ("resume_shards", 2)],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(results, scenario, trained):
    for rank in results(scenario):
        whole, rest = rank["whole"], rank["rest"]
        assert len(whole["rollouts"]) == 4
        assert rest["rollouts"] == whole["rollouts"][trained:]
        for expected, row in zip(whole["rows"][trained + 1 :], rest["rows"][1:], strict=True):
            assert comparable(row) == comparable(expected)
            assert math.isfinite(row["policy/loss"])


# -------------------------------------------------------------------- another number of processes


def require_rest(rest, whole, trained, tolerance=TOLERANCE):
    """What was left of a run after ``trained`` iterations, as if nothing had happened."""
    batches = zip(*(rank["rollouts"] for rank in rest), strict=True)
    shares = [[rollout for share in batch for rollout in share] for batch in batches]
    expected = whole["rollouts"][trained:]
    for ours, theirs in zip(shares, expected, strict=True):
        assert sorted(map(list, ours)) == sorted(map(list, theirs))
    left = len(expected)  # before these there may be a row of the first sync
    for ours, theirs in zip(rest[0]["rows"][-left:], whole["rows"][-left:], strict=True):
        expected = pytest.approx(comparable(theirs), rel=tolerance, abs=tolerance)
        assert comparable(ours) == expected


def test_8_bits_of_shared_weights_are_refused(results):
    for rank in results("shared_8bit"):
        assert rank["error"] == "ConfigError"
        assert rank["message"].startswith("optimizer=AdamW8bit steps whole parameters, of which")


@pytest.mark.parametrize("scenario", ["one_to_two", "one_to_shared", "one_to_fsdp"])
def test_two_processes_go_on_with_what_one_had_collected(results, alone, scenario):
    two = results(scenario)
    assert len(two[0]["rollouts"][0]) == len(two[1]["rollouts"][0]) == GROUPS * GROUP_SIZE // 2
    require_rest(two, alone(False), 2)


@pytest.mark.parametrize(
    ("scenario", "checkpoint", "strategy"),
    [
        ("resume_ddp", "iteration_3.ckpt", "auto"),
        ("resume_fsdp", "iteration_3.ckpt", "auto"),
        ("resume_shards", "iteration_2.ckpt", "fsdp"),
        ("replay_saved", "iteration_2.ckpt", "auto"),
    ],
)
def test_one_process_goes_on_where_two_stopped(
    results, alone, tiny_model, folder, scenario, checkpoint, strategy
):
    results(scenario)
    replays = scenario == "replay_saved"
    run = folder / scenario if replays else folder / scenario / "whole"
    options = replaying(run) if replays else {}
    path, where = checkpoint_of(run, checkpoint), folder / "alone" / f"{scenario}_rest"
    go_on = partial(gone_on, str(tiny_model), where, checkpoint=path, processes=1, **options)
    if strategy == "fsdp":
        # In a process of its own: it leaves a process group, at which vLLM would stumble in a later
        # test, and the variables by which others would look for it.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rest = pool.submit(go_on, ModelParallelStrategy(1, 1)).result(SECONDS)
    else:
        rest = go_on(strategy)
    # Importance weights, of which some are above 6 here, are larger than logprobs, errors too.
    tolerance = 6 * TOLERANCE if replays else TOLERANCE
    trained = int(path.stem.removeprefix("iteration_"))
    require_rest([rest], alone(replays), trained, tolerance)


def test_one_process_goes_on_with_what_two_were_generating(results, tiny_model, folder):
    """Working ahead, rollouts depend on time; but no prompt is lost or trained on twice."""
    two = results("ahead")
    path = checkpoint_of(folder / "ahead", "iteration_2.ckpt")
    where = folder / "alone" / "ahead_rest"
    rest = gone_on(
        str(tiny_model), where, "auto", path, data={"collector": AsyncCollector(max_staleness=1)}
    )
    batches = [*two[0]["rollouts"][:2], *two[1]["rollouts"][:2], *rest["rollouts"]]
    trained = [rollout[0] for batch in batches for rollout in batch]
    assert len(set(trained)) == len(trained) == 4 * GROUPS * GROUP_SIZE
    state = torch.load(path, weights_only=True)["RLDataModule"]["loader"]["ranks"]
    waiting = {g[0]["group_id"] for s in state for g in s["source"]["collector"]["groups"]}
    assert waiting  # something was in flight or done
    assert waiting <= {name.rpartition("/")[0] for name in trained}
    prompts = [name.split("/")[2] for name in trained[::GROUP_SIZE]]
    assert len(set(prompts)) == len(prompts)
    assert all(row["rollout/staleness_max"] <= 1 for row in rest["rows"][1:])


# ------------------------------------------------------------------------------ folders, by "last"


@pytest.fixture(scope="module")
def stopped_folders(tiny_model, folder) -> Path:
    """A run of two whose checkpoints are folders, and that failed in its third iteration."""
    where = folder / "folders"
    where.mkdir()
    for rank in run_two("tests.support.ranks_folders", tiny_model, where, "stopped")("stopped"):
        assert rank == {"error": "LightningRLError", "message": "stopped"}
    return where


@pytest.mark.parametrize("ranks", [2, 4, 1])
def test_last_goes_on_from_a_folder_on_any_number_of_processes(
    stopped_folders, alone, tiny_model, folder, ranks
):
    where = folder / f"folders_on_{ranks}"
    copytree(stopped_folders, where, symlinks=True)
    rest = run_two("tests.support.ranks_folders", tiny_model, where, "rest", ranks=ranks)("rest")
    assert [len(rank["rollouts"]) for rank in rest] == [2] * ranks
    require_rest(rest, alone(False), 2)
    saved = checkpoint_of(where, "last.ckpt").parent
    assert {path.name for path in saved.iterdir() if path.is_dir() and not path.is_symlink()} == {
        f"iteration_{n}.ckpt" for n in (1, 2, 3, 4)
    }
    assert os.readlink(saved / "last.ckpt") == "iteration_4.ckpt"
    shards = len(list((saved / "iteration_4.ckpt").glob("*.distcp")))
    assert shards == ranks


def test_last_passes_over_a_folder_that_is_not_whole(stopped_folders, tmp_path):
    copytree(stopped_folders, tmp_path / "run", symlinks=True)
    newest = checkpoint_of(tmp_path / "run", "iteration_2.ckpt")
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
    with pytest.raises(CheckpointError, match=r"a folder without meta\.pt, so not all of it was"):
        newest_good(newest.parent)


def test_shards_are_for_strategies_that_shard(results, tiny_model, folder):
    results("resume_shards")
    path = checkpoint_of(folder / "resume_shards" / "whole", "iteration_2.ckpt")
    with pytest.raises(CheckpointError, match="folder of shards, which only ModelParallelStrategy"):
        saved(str(tiny_model), folder / "other", "auto", ckpt_path=str(path))
