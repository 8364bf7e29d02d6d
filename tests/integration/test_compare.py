"""Test lightning-rl compare with runs of seconds: their order, a resume, a failure, a budget.

Slow: each run is a command, which starts in ten seconds.
"""

import json

import pytest
import yaml

from lightning_rl.cli import main
from tests.support.recorded_run import config_of, make_place, stand_in

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model):
    """Return a folder with a configuration of two iterations, and files that change it."""
    make_place(tmp_path)
    stand_in(tmp_path, monkeypatch)
    tree = config_of(tiny_model)
    data = tree["data"]["init_args"]
    data["engine"] = {"class_path": "TransformersEngine", "init_args": {"device": "cpu"}}
    data["evaluation"] = {"prompts": "train.jsonl", "success_reward": 0.2}
    data["iterations_per_epoch"] = 2
    for name, change in {
        "slow": tree,
        "fast": {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.03}}}}},
        "broken": {"data": {"init_args": {"rewards": ["broken_rewards.fails"]}}},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(change))
    broken = "def fails(completions, **columns):\n    raise ValueError('no answer')\n"
    (tmp_path / "broken_rewards.py").write_text(broken)
    return tmp_path


COMMAND = ["compare", "slow.yaml", "slow.yaml+fast.yaml", "--seeds", "2", "--out", "out"]


def ended(place) -> list[tuple[str, int]]:
    lines = (place / "out/runs.jsonl").read_text().splitlines()
    return [(row["configuration"], row["seed"]) for row in map(json.loads, lines)]


def values(place) -> dict[tuple[str, int], float]:
    result = json.loads((place / "out/compare.json").read_text())
    return {(run["configuration"], run["seed"]): run["value"] for run in result["runs"]}


def test_a_comparison_alternates_resumes_and_refuses_changes(place, capsys):
    assert main(COMMAND) == 1  # two pairs decide nothing
    said = capsys.readouterr()
    runs = [("slow", 0), ("slow+fast", 0), ("slow+fast", 1), ("slow", 1)]
    assert ended(place) == runs
    assert "slow+fast differs from slow: model.optimizer.lr 0.03, not 0.01" in said.err
    assert "slow+fast and slow: undecided after 2 pairs" in said.out
    first = values(place)
    assert first.keys() == set(runs)
    row = json.loads((place / "out/slow/seed_1/metrics.jsonl").read_text().splitlines()[-1])
    assert first["slow", 1] == row["eval/accuracy"]
    assert "seed_1" in (place / "out/view.html").read_text()

    # A kill in the last run leaves its folder, but no line.
    log = place / "out/runs.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    (place / "out/slow/seed_1/summary.json").unlink()
    others = place / "out/slow/seed_0/metrics.jsonl"
    untouched = others.stat().st_mtime_ns
    assert main(COMMAND) == 1
    assert ended(place) == runs
    assert values(place) == first  # the run was repeated bit for bit
    assert others.stat().st_mtime_ns == untouched

    # Another question to the same runs trains nothing.
    capsys.readouterr()
    assert main([*COMMAND, "--target", "0.0"]) == 1
    said = capsys.readouterr().out
    assert "reached 0" in said
    assert "2 of 2" in said
    assert ended(place) == runs

    assert main([*COMMAND, "--data.group_size=2"]) == 2
    said = capsys.readouterr().err
    assert "data.group_size: 4 then, 2 now" in said
    assert "choose another --out" in said


def test_a_run_that_fails_stops_the_comparison_with_its_error(place, capsys):
    command = ["compare", "slow.yaml", "slow.yaml+broken.yaml", "--out", "out"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "lightning-rl: run failed: slow+broken with seed 0" in said
    assert "ended with exit status 1: reward error" in said
    assert "ValueError: no answer" in said
    assert ended(place) == [("slow", 0)]


def test_a_spent_budget_ends_a_run(place, capsys):
    assert main([*COMMAND, "--budget", "1s"]) == 1
    said = capsys.readouterr()
    assert "after the start of slow with seed 0, which is lost" in said.err
    assert "undecided after 0 pairs" in said.out
    assert ended(place) == []
