"""OpenMP's threads spin briefly where they wait: the command's, its children's, not the user's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # with which libgomp is loaded, if torch computes with it

from lightning_rl.run.processes import openmp
from lightning_rl.run.processes.openmp import spin_briefly, why_slow

MAPS = Path("/proc/self/maps")
with_libgomp = pytest.mark.skipif(
    not (torch.backends.openmp.is_available() and MAPS.exists() and "libgomp" in MAPS.read_text()),
    reason="torch computes without libgomp here",
)
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

COMMAND = """
import runpy, sys
from lightning_rl import cli
cli.COMMANDS["loads_torch"] = cli.Command("loads_torch", "")
sys.argv = ["lightning-rl", "loads_torch"]
runpy.run_module("lightning_rl", run_name="__main__")
"""
LOADS_TORCH = """
import subprocess, sys
def main(options):
    import torch
    return subprocess.call([sys.executable, "-c", "import torch"])
"""


@pytest.fixture
def unset(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back as it was
        monkeypatch.delenv(name)


def counts_told(place: Path, **variables: str) -> list[str]:
    """Return each libgomp's spin count, of a command's process and its child."""
    (place / "loads_torch.py").write_text(LOADS_TORCH)
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | variables
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)


@with_libgomp
def test_a_command_and_its_children_load_torch_with_a_short_spin(tmp_path):
    counts = counts_told(tmp_path)
    assert len(counts) >= 2
    assert set(counts) == {str(openmp.SPINS)}


@with_libgomp
def test_a_command_leaves_the_users_spin(tmp_path):
    assert set(counts_told(tmp_path, GOMP_SPINCOUNT="7")) == {"7"}


def test_it_is_set_once(unset):
    assert spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(openmp.SPINS)
    assert not spin_briefly()


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_what_the_user_chose_stays(unset, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not spin_briefly()
    assert [os.environ.get(variable) for variable in VARIABLES].count(None) == 1
    assert os.environ[name] == value


@with_libgomp
def test_a_process_that_has_loaded_libgomp_is_told_what_to_export():
    assert f"`export GOMP_SPINCOUNT={openmp.SPINS}` before Python starts" in why_slow()


def test_a_process_without_libgomp_is_told_nothing():
    script = "from lightning_rl.run.processes.openmp import why_slow; print(repr(why_slow()))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "''\n"
