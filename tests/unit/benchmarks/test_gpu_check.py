"""Test the runner of a GPU machine's checks: records are whole, and nothing stops the others."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.runner import ROOT, run_all
from benchmarks.gpu.table import CHECKS, Check
from tests.support.engine_checks import is_running, wait_for


def fake(name, limit_s=30.0, needs=None, **options):
    function = name.replace("-", "_")
    return Check(name, f"tests.support.gpu_fakes:{function}", limit_s, options, needs)


@pytest.fixture
def run(tmp_path):
    def run_checks(*checks, seconds=60.0):
        records = []
        summary = run_all(checks, "cpu", tmp_path, seconds, records.append)
        return {record["check"]: record for record in records}, summary

    return run_checks


def test_every_outcome_leaves_a_whole_record(run):
    records, summary = run(
        fake("broken"),
        fake("two-cases"),
        fake("dies"),
        fake("leaves"),
        fake("good", figure=3),
        fake("absent", needs="no_such_package"),
    )
    for name, record in records.items():
        assert record.keys() == {"check", "device", "outcome", "figures", "error", "seconds"}
        assert (record["check"], record["device"]) == (name, "cpu")
        json.dumps(record)
    good = records["good"]
    assert (good["outcome"], good["error"]) == ("pass", None)
    assert good["figures"] == {"figure": 3, "tiny": True, "third": 0.3333}
    assert records["broken"]["figures"] == {"before": 1}
    assert records["broken"]["error"].endswith("ValueError: a wrong value")
    assert records["two-cases"]["figures"] == {"second": "made"}
    assert "the first broke" in records["two-cases"]["error"]
    assert records["two-cases"]["error"].endswith("the sum is wrong")
    # The record of one that crashed has its findings, how it ended, and where it was.
    assert records["dies"]["figures"] == {"before": 2}
    assert "SIGSEGV" in records["dies"]["error"]
    assert "in dies" in records["dies"]["error"]
    assert "status 0" in records["leaves"]["error"]
    assert records["absent"]["error"] == "no_such_package is not installed"
    assert summary["summary"] == {"pass": 1, "fail": 4, "skipped": 1}
    assert summary["failed"] == ["broken", "two-cases", "dies", "leaves"]
    assert summary["skipped"] == ["absent"]


def test_a_check_that_hangs_is_ended_with_all_that_it_started(run):
    hangs = Check("hangs", "tests.support.gpu_fake_import:hangs", 0.5)
    records, _ = run(fake("waits-for", file="imported"), hangs, fake("good", figure=1))
    # Its imports were there before its turn, which had not come.
    assert records["waits-for"]["figures"] == {"began": False}
    assert records["hangs"]["outcome"] == "fail"
    assert records["hangs"]["error"].splitlines() == ["ended after its 0.5 s", "hanging now"]
    wait_for(lambda: not is_running(records["hangs"]["figures"]["child"]), 10)
    assert records["good"]["outcome"] == "pass"


def test_when_the_time_is_over_the_rest_is_skipped(run):
    records, summary = run(fake("good", figure=1), seconds=0.0)
    assert (records["good"]["outcome"], records["good"]["seconds"]) == ("skipped", 0.0)
    assert summary["summary"] == {"pass": 0, "fail": 0, "skipped": 1}


def test_the_command_lists_runs_some_and_says_by_its_status_what_came_of_it(
    capsys, monkeypatch, tmp_path
):
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.split("\n") == [*(check.name for check in CHECKS), ""]
    monkeypatch.setattr(command, "CHECKS", [fake("good", figure=1), fake("broken")])
    assert command.main(["--device=cpu", "--only=goo", f"--out={tmp_path / 'kept'}"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "kept").read_text() == out
    record, summary = map(json.loads, out.splitlines())
    assert (record["check"], summary["summary"]["pass"]) == ("good", 1)
    for counts in ({"pass": 3, "fail": 1}, {"pass": 0, "fail": 0}):
        monkeypatch.setattr(command, "run_all", lambda *_, counts=counts: {"summary": counts})
        assert command.main(["--device=cpu"]) == 1
    monkeypatch.setattr(command, "sees_cuda", lambda: False)
    for options, why in (
        (["--only=nothing"], "no check has 'nothing' in its name"),
        ([], "torch sees no CUDA device"),
    ):
        assert command.main(options) == 2
        assert why in capsys.readouterr().err
    monkeypatch.setattr(command, "NEEDED", ["tensordict", "no_such_package"])
    assert command.main([]) == 2
    assert capsys.readouterr().err.startswith("gpu-check: no_such_package not installed")


def test_make_lists_them_with_any_python():
    make = ["make", "gpu-check", "LIST=1", "ONLY=push", f"GPU_PYTHON={sys.executable}"]
    # Below `make test` it would also say which directory it enters.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = subprocess.run(
        make, check=True, capture_output=True, text=True, cwd=ROOT, env=alone
    ).stdout
    assert listed.split() == [check.name for check in CHECKS if "push" in check.name]


def test_names_are_distinct():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
