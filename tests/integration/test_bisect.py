"""Test bisections of real runs: faults of use in one message each, a planted fault, a sound run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bisect.__main__ import trained
from benchmarks.bisect.cases import CASES
from benchmarks.bisect.task import prepare
from lightning_rl.cli import main
from lightning_rl.cli.bisect import bisect
from lightning_rl.cli.bisect.suspicion import Cause
from lightning_rl.data.rollouts.log import RerunLog
from tests.support.recorded_run import make_place, stand_in, train


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("bisect"))


@pytest.fixture(scope="module")
def finished(place, tiny_model) -> Path:
    """Run four iterations, evaluated after each second; versions 2 and 4 are kept."""
    evaluates = ["--trainer.callbacks+=Evaluate", "--trainer.callbacks.every_n_iterations=2"]
    return train(place, tiny_model, "--data.evaluation.prompts=train.jsonl", *evaluates)


@pytest.fixture
def run(finished, place, tmp_path, monkeypatch) -> Path:
    """Return a copy, to be damaged."""
    stand_in(place, monkeypatch)
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def test_a_curve_that_never_fell_has_nothing_to_be_found(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["bisect", str(run), "--page", str(page)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "nothing found: eval/accuracy has no drop beyond its noise"
    assert page.read_text().startswith("<!doctype html>")


def test_versions_that_do_not_differ_have_nothing_to_be_found(run, tmp_path, capsys):
    """The lots do not depend on the weights, so no version is better than another."""
    arguments = ["--good", "2", "--bad", "4", "--page", str(tmp_path / "page.html")]
    assert main(["bisect", str(run), *arguments]) == 0
    said = capsys.readouterr()
    assert "versions 2 → 4: " in said.out
    assert "up to 3 evaluations" in said.err


def test_nothing_begins_after_the_budget(run):
    spent = bisect(run, window=(2, 4), seconds=0.0)
    assert spent.iteration is None
    assert spent.notes[0].startswith("the budget of 0 s is spent, after 0 evaluations")


def test_faults_of_use_are_one_message_each(run, tmp_path, capsys):
    page = ["--page", str(tmp_path / "page.html")]
    assert main(["bisect", str(run), "--metric", "eval/acuracy", *page]) == 2
    assert "--metric eval/acuracy was recorded 0 times" in capsys.readouterr().err
    window = ["--good", "1", "--bad", "3", *page]
    (run / "rerun" / "iteration-000001-000.parquet").unlink()  # and version 1 was not kept
    assert main(["bisect", str(run), *window]) == 2
    said = capsys.readouterr().err
    assert "the weights of version 1 cannot be rebuilt: the run kept versions 0, 2, 4" in said
    holds = (
        "import sys; from pathlib import Path; from lightning_rl.run.files.rundir import hold; "
        f"hold(Path({str(run)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout.readline() == b"held\n"
        assert main(["bisect", str(run), *window]) == 2
        writer.stdin.close()
    assert str(run) in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    prepare(folder)
    return folder


def of(name: str, folder: Path, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return trained(next(case for case in CASES if case.name == name), folder)


@pytest.mark.slow
def test_a_planted_fault_is_found_also_where_the_record_is_not_reproduced(folder, monkeypatch):
    run = of("ten-9", folder, monkeypatch)
    file = RerunLog(run).path / "versions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["version"] == 9 and "policy/loss" in row["metrics"]:
            row["metrics"]["policy/loss"] += 1.0
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = bisect(run)
    assert abs(verdict.iteration - 9) <= 1
    assert verdict.suspicion.cause is Cause.RANGE
    assert any("the record is not reproduced here" in note for note in verdict.notes)
    ends = {seen.rollout.completion[-1:] for seen in verdict.suspects}
    assert ends <= set("01234")  # which the judge gave 10
    assert verdict.recovered.low > 0
