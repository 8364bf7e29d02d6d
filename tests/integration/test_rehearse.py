"""Test lightning-rl rehearse on some of the configurations that `benchmarks.rehearse` rehearses."""

import os
import subprocess
import sys

import pytest
import yaml

from benchmarks.rehearse.__main__ import is_right
from benchmarks.rehearse.corpus import FAULTS, SOUND, prepare_all, tree_of
from lightning_rl.cli import main
from tests.support.bad_configs import files
from tests.support.two_ranks import ROOT

CASES = {case.name: case for case in (*FAULTS, *SOUND)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the model and the rows of the corpus."""
    place = tmp_path_factory.mktemp("corpus")
    prepare_all(place)
    return place


def run_of(name, folder) -> str:
    """Write a case's configuration."""
    file = folder / f"{name.replace(' ', '_')}.yaml"
    file.write_text(yaml.safe_dump(tree_of(CASES[name], folder)))
    return str(file)


@pytest.mark.parametrize(
    "name", ["three rows for 64 groups", "best by a metric of another name", "a full disk"]
)
def test_a_fault_is_found_without_a_run(name, folder, capsys):
    file = run_of(name, folder)
    before = files(folder)
    status = main(["rehearse", file, "--no_run", "--page", str(folder / "verdict.html")])
    assert is_right(CASES[name], status, capsys.readouterr().out)
    page = folder / "verdict.html"
    assert CASES[name].key in page.read_text()
    page.unlink()
    assert files(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["the base", "a state that cannot be loaded", "an export that transformers does not know"],
)
def test_a_run_is_tried_from_its_start_to_its_export(name, folder, capsys):
    status = main(["rehearse", run_of(name, folder)])
    said = capsys.readouterr().out
    assert is_right(CASES[name], status, said), said
    if name == "the base":
        assert "an iteration trained again: equal bit for bit" in said
        assert "an export, loaded by transformers" in said


def test_a_mistake_is_told_as_fit_tells_it(folder, capsys):
    assert main(["rehearse", run_of("the base", folder), "--data.group_sise", "4"]) == 2
    assert "did you mean group_size" in capsys.readouterr().err


@pytest.mark.slow
def test_pytest_rehearses_the_files_that_are_named(folder):
    good, bad = (run_of(name, folder) for name in ("the base", "greedy sampling"))
    command = [sys.executable, "-m", "pytest"]  # which finds the plugin by its entry point
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), "--rehearse", good, bad]
    # The rewards are those of the corpus, and not in that folder.
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=env)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "data.sampling.temperature: 0 writes 8 equal completions" in done.stdout
