"""Test what ``view --follow`` tells of runs that go on: what is new, and what was replaced."""

import json
import os
import time

import pytest

from lightning_rl.cli.view.blocks import ROLLOUTS_PER_BLOCK
from lightning_rl.cli.view.following import QUIET_MINUTES
from tests.support.growing_run import Page, add, line, recorded

# ---------------------------------------------------------------- a run


def test_only_what_is_new_is_answered(tmp_path):
    page = Page(tmp_path)
    add(tmp_path / "metrics.jsonl", line(1, a=1.0) + line(2, a=2.0))
    assert len(page.ask()["runs"][0]["metrics"]) == 2
    assert page.ask() == {"cursor": page.cursor}
    add(tmp_path / "metrics.jsonl", line(3, a=None))
    [entry] = page.ask()["runs"]
    assert entry["metrics"] == [{"iteration": 3, "a": "nan"}]  # JSON has no nan
    assert page.values() == [(1, 1.0), (2, 2.0), (3, "nan")]
    late = Page(tmp_path)
    late.following = page.following  # another tab
    late.ask()
    assert late.values() == page.values()


def test_a_second_row_of_an_iteration_is_merged_with_the_first(tmp_path):
    page = Page(tmp_path)
    add(tmp_path / "metrics.jsonl", line(1, a=1.0) + line(2, a=2.0, b=7.0))
    page.ask()
    add(tmp_path / "metrics.jsonl", line(2, a=3.0))
    [entry] = page.ask()["runs"]
    assert entry["metrics"] == [{"iteration": 2, "a": 3.0, "b": 7.0}]


def test_a_run_that_was_killed_and_resumed_shows_what_it_wrote_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    page = Page(tmp_path)
    add(path, line(1, a=1.0) + line(2, a=2.0) + line(3, a=3.0) + line(4, a=4.0)[:12])
    page.ask()
    assert page.values() == [(1, 1.0), (2, 2.0), (3, 3.0)]
    os.truncate(path, len(line(1, a=1.0)))  # as it resumes, to its checkpoint
    page.ask()
    assert page.values() == [(1, 1.0)]
    add(path, line(2, a=2.5) + line(3, a=3.5))
    page.ask()
    assert page.values() == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_new_rollouts_come_alone_and_the_last_are_kept(tmp_path):
    path = tmp_path / "recorded.jsonl"
    page = Page(tmp_path, rollouts=3)
    add(path, recorded(0.1, 0.2, 0.3, 0.4))
    page.ask()
    assert page.rewards() == [0.2, 0.3, 0.4]
    add(path, recorded(0.5, 0.6, iteration=2))
    [entry] = page.ask()["runs"]
    assert [len(block["rollouts"]) for block in entry["blocks"]] == [2]
    assert page.rewards() == [0.2, 0.3, 0.4, 0.5, 0.6]  # whole blocks, at least three rollouts
    add(path, recorded(0.7, iteration=3))
    [entry] = page.ask()["runs"]
    assert page.rewards() == [0.5, 0.6, 0.7]
    assert entry["rollouts_total"] == 7


def test_rollouts_that_a_resumed_run_records_again_replace_the_first(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    page = Page(tmp_path)
    add(path, recorded(0.1, 0.2) + recorded(0.3, iteration=2))
    page.ask()
    add(path, recorded(0.9, iteration=2))
    page.ask()
    assert page.rewards() == [0.1, 0.2, 0.9]
    add(path, recorded(0.4, iteration=3))
    page.ask()
    assert page.rewards() == [0.1, 0.2, 0.9, 0.4]


def test_a_file_that_holds_more_takes_the_place_of_the_other(tmp_path):
    page = Page(tmp_path)
    add(tmp_path / "rollouts.jsonl", recorded(0.1))
    page.ask()
    add(tmp_path / "recorded.jsonl", recorded(0.1, 0.2))
    page.ask()
    assert page.rewards() == [0.1, 0.2]


@pytest.mark.parametrize("suffix", ["parquet", "sqlite"])
def test_files_of_other_formats_are_read_again_when_they_grow(tmp_path, make_rollout, suffix):
    from lightning_rl.data.rollouts.files import open_rollouts

    path = tmp_path / f"some.{suffix}"
    store = open_rollouts(path)
    store.append([make_rollout([3], [4, 1], reward=0.25)], iteration=7, progress={})
    page = Page(path)
    page.ask()
    assert page.rewards() == [0.25]
    store.append([make_rollout([3], [5, 1], reward=0.5, group_id="h")], iteration=8, progress={})
    store.close()
    page.ask()
    assert page.rewards() == [0.25, 0.5]


def test_many_rollouts_come_in_blocks(tmp_path):
    page = Page(tmp_path, rollouts=1000)
    add(tmp_path / "recorded.jsonl", recorded(*[0.5] * 300))
    [entry] = page.ask()["runs"]
    sizes = [len(block["rollouts"]) for block in entry["blocks"]]
    assert sizes == [ROLLOUTS_PER_BLOCK, 300 - ROLLOUTS_PER_BLOCK]


# ---------------------------------------------------------------- what is told of a run


def state(page: Page) -> str:
    return page.ask()["runs"][0]["state"]


def test_the_state_of_a_run(tmp_path):
    page = Page(tmp_path)
    metrics, summary = tmp_path / "metrics.jsonl", tmp_path / "summary.json"
    add(metrics, line(1))
    assert state(page) == "running"
    quiet = time.time() - 60 * (QUIET_MINUTES + 1) - 30
    os.utime(metrics, (quiet, quiet))
    assert state(page) == f"no row for {QUIET_MINUTES + 1} minutes"
    summary.write_text('{"status": "failed", "error": "RewardError: no judge"}')
    assert state(page) == "failed: RewardError: no judge"
    add(metrics, line(2))  # resumed
    later = summary.stat().st_mtime + 1
    os.utime(metrics, (later, later))
    assert state(page) == "running"
    summary.write_text('{"status": "completed", "error": null}')
    os.utime(summary, (later + 1, later + 1))
    assert state(page) == "completed"


def test_runs_that_are_not_there_yet_are_waited_for(tmp_path, capsys):
    page = Page(tmp_path / "grpo")
    answer = page.ask()
    assert answer["runs"] == []
    [problem] = answer["problems"]
    assert problem.startswith(f"waiting: {tmp_path / 'grpo'} does not exist")
    assert page.ask() == {"cursor": page.cursor}
    assert capsys.readouterr().err == f"lightning-rl: {problem}\n"  # once
    add(tmp_path / "grpo" / "version_1" / "metrics.jsonl", line(1, a=1.0))
    answer = page.ask()
    assert [entry["state"] for entry in answer["runs"]] == ["running"]
    assert answer["problems"] == []
    # A run that appears later comes after those that are shown.
    add(tmp_path / "grpo" / "version_0" / "metrics.jsonl", line(1, a=2.0))
    names = [entry["name"].rpartition("/")[2] for entry in page.ask()["runs"]]
    assert names == ["version_1", "version_0"]


def test_settings_that_differ_come_with_the_second_run(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        add(tmp_path / name / "config.yaml", f"seed_everything: {seed}\nmodel: {{lr: 0.1}}\n")
    add(tmp_path / "a" / "metrics.jsonl", line(1))
    page = Page(tmp_path)
    assert [entry["settings"] for entry in page.ask()["runs"]] == [{}]
    add(tmp_path / "b" / "metrics.jsonl", line(1))
    told = [entry["settings"] for entry in page.ask()["runs"]]
    assert told == [{"seed_everything": "1"}, {"seed_everything": "2"}]


def test_damage_is_said_once_and_hides_nothing(tmp_path, capsys):
    page = Page(tmp_path)
    add(tmp_path / "metrics.jsonl", line(1, a=1.0) + "\x1bgarbage\n")
    add(tmp_path / "recorded.jsonl", '{"id": "x"}\n' + recorded(0.5))
    problems = page.ask()["problems"]
    assert [problem.split(": ")[0].rpartition("/")[2] for problem in problems] == [
        "metrics.jsonl:2",
        "recorded.jsonl:1",
    ]
    add(tmp_path / "metrics.jsonl", line(2, a=2.0))
    assert page.ask()["problems"] == problems
    assert page.values() == [(1, 1.0), (2, 2.0)]
    assert page.rewards() == [0.5]
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert "\x1b" not in said


def test_rollouts_that_cannot_be_shown_are_tried_again(tmp_path):
    run = tmp_path / "run"
    page = Page(run)
    add(run / "rollouts.jsonl", recorded(0.5))
    (run / "pictures").symlink_to(tmp_path)
    [problem] = page.ask()["problems"]
    assert "pictures is a link to a file outside its run" in problem
    assert page.ask() == {"cursor": page.cursor}  # as before
    (run / "pictures").unlink()
    assert page.ask()["problems"] == []
    assert page.rewards() == [0.5]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "recorded.jsonl", "config.yaml"])
def test_a_link_out_of_a_run_is_not_followed(tmp_path, name):
    (tmp_path / "secret").write_text(json.dumps({"iteration": 0, "key": "sk-1"}) + "\n")
    run = tmp_path / "run"
    add(run / "rollouts.jsonl", recorded(0.5))
    (run / name).symlink_to(tmp_path / "secret")
    answer = Page(run).ask()
    assert any(f"{name} is a link to a file outside its run" in p for p in answer["problems"])
    assert "sk-1" not in json.dumps(answer)
