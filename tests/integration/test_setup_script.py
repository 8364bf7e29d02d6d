"""Test install/setup.sh on a copy, for real: each way it can fail says what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a folder with what the script reads; no .venv."""
    shutil.copytree(ROOT / "install", tmp_path / "install")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def run_setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        [checkout / "install" / "setup.sh"],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_usable_python_it_names_what_is_needed(checkout: Path):
    done = run_setup(checkout, PYTHON="/nowhere/python3.11")
    assert done.returncode == 1
    assert done.stderr == (
        "setup failed: Python 3.11, 3.12 or 3.13 is needed and none of these is one: "
        "/nowhere/python3.11; install one, or name it: make setup PYTHON=/path/to/python\n"
    )
    assert not (checkout / ".venv").exists()


def test_it_does_not_touch_a_venv_that_it_did_not_make(checkout: Path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("kept")
    done = run_setup(checkout)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert (checkout / ".venv" / "mine").read_text() == "kept"


def test_a_full_disk_is_found_before_anything_is_written(checkout: Path):
    # The only stand-in here: a df that reports 2 GiB free (in KiB, as df -Pk prints).
    bin_folder = checkout / "bin"
    bin_folder.mkdir()
    df = bin_folder / "df"
    df.write_text("#!/bin/sh\necho header\necho /dev/x 9 9 2097152 99% /\n")
    df.chmod(0o755)
    done = run_setup(checkout, PATH=f"{bin_folder}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "2 GB free" in done.stderr
    assert "free some space" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_without_a_package_index_it_says_so_and_the_next_run_starts_afresh(checkout: Path):
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    first = run_setup(checkout, **closed)
    assert first.returncode == 1
    assert "check the network, the proxy (HTTPS_PROXY) or the mirror" in first.stderr
    leftover = checkout / ".venv" / "half-installed"
    leftover.write_text("")
    second = run_setup(checkout, **closed)
    assert "the last set-up did not finish; starting again" in second.stdout
    assert not leftover.exists()
    assert not (checkout / ".venv" / "setup.stamp").exists()
