"""Test which files lightning-rl quickstart writes before it trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.cli.quickstart import copy_recipes
from lightning_rl.errors import DiskError

ROOT = Path(__file__).parents[3]


def test_recipes_are_copied_whole_and_what_is_there_stays(tmp_path):
    copied = {path.relative_to(tmp_path) for path in copy_recipes(tmp_path)}
    assert Path("recipes/__init__.py") in copied
    for name in ("reward.py", "grpo.yaml", "README.md", "variants/async.yaml"):
        path = Path("recipes/sort_digits") / name
        assert path in copied
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
    assert not list(tmp_path.rglob("*.pyc"))
    assert not list(tmp_path.rglob("*.partial"))
    changed, lost = (tmp_path / "recipes/sort_digits" / name for name in ("reward.py", "sft.yaml"))
    changed.write_text("mine")
    lost.unlink()
    assert copy_recipes(tmp_path) == [lost]
    assert changed.read_text() == "mine"


def test_in_a_checkout_nothing_is_copied():
    assert copy_recipes(ROOT) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "recipes").write_text("a file")
    with pytest.raises(DiskError, match=f"cannot be written to {tmp_path}/recipes: .*; run this"):
        copy_recipes(tmp_path)


def test_what_is_copied_is_what_runs(tmp_path):
    copy_recipes(tmp_path)
    recipe = tmp_path / "recipes/smollm2/quickstart.py"
    recipe.write_text("def main(arguments):\n    print(__file__, *arguments)\n    return 7\n")
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--iterations", "2"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{recipe} --iterations 2\n"
