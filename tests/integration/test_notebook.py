"""Test that docs/notebook.ipynb runs as it stands, and its first cell installs what is missing."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
KERNEL = ROOT / "build" / "notebook" / "bin" / "python"  # of install/environment.sh
NOT_BUILT = (".*", "__pycache__", "*.egg-info", "build", "dist", "docs", "runs", "site", "tests")
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

read, written = sys.argv[1:]
notebook = nbformat.read(read, as_version=4)
try:
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
finally:
    nbformat.write(notebook, written)
"""


def cells() -> dict[str, str]:
    """Return the source of each code cell, by its id."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in found] == [[]] * len(found)  # as it is committed
    return {cell["id"]: "".join(cell["source"]) for cell in found}


def printed(cell: dict) -> str:
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


@pytest.mark.slow
def test_the_notebook_trains_resumes_and_shows(tmp_path):
    assert KERNEL.exists(), "run `make environments` first, as make test-all does"
    ran = tmp_path / "ran.ipynb"
    done = subprocess.run(
        [str(KERNEL), "-c", EXECUTE, str(NOTEBOOK), str(ran)],
        cwd=tmp_path,
        env={**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    by_id = {cell["id"]: cell for cell in json.loads(ran.read_text("utf-8"))["cells"]}
    assert printed(by_id["install"]) == ""
    assert "next_digit" in printed(by_id["peek"])
    run = tmp_path / "runs" / "next_digit" / "version_0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row["iteration"] for row in rows if "reward/mean" in row]
    assert trained == list(range(1, 25))  # 12, and 12 more in the same directory
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"]
    shown = [output["data"] for output in by_id["look"]["outputs"] if "data" in output]
    assert any("image/png" in data for data in shown)
    assert printed(by_id["ask"]).count("=") == 3


@pytest.mark.slow
def test_the_first_cell_installs_a_wheel_that_lies_beside_the_notebook(tmp_path):
    """The environment lacks the library, as Colab's does; its packages would be gigabytes."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    (tmp_path / "here").mkdir()

    def install(before: str = "") -> subprocess.CompletedProcess:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [python, "-c", before + cells()["install"]],
            cwd=tmp_path / "here",
            env={**environment, "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"},
            capture_output=True,
            text=True,
        )

    missing = install()
    assert missing.returncode == 1
    assert "no lightning_rl-*.whl beside this notebook" in missing.stderr
    copy = tmp_path / "copy"  # a build leaves files in its source
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_BUILT))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", str(tmp_path / "made"), str(copy)],
        check=True,
    )  # fmt: skip
    # A dialogue brings the wheel to the working directory, as in Colab.
    colab = tmp_path / "here" / "google" / "colab"
    colab.mkdir(parents=True)
    (colab / "files.py").write_text(
        "import shutil\n"
        f"def upload(): shutil.copytree({str(tmp_path / 'made')!r}, '.', dirs_exist_ok=True)\n"
    )
    installed = install(before="import google.colab\n")
    assert (installed.returncode, installed.stderr) == (0, "")
    found = f"import lightning_rl; assert lightning_rl.__file__.startswith({str(bare)!r})"
    subprocess.run([python, "-I", "-c", found], check=True, cwd=tmp_path)


@pytest.mark.parametrize(("after", "removed"), [("2.10.0+cu126", False), ("2.13.0", True)])
def test_a_new_torch_takes_no_old_torchvision_along(tmp_path, monkeypatch, after, removed):
    """Colab's were built for its own torch, and would break the import of transformers."""
    torch = tmp_path / "torch-0.dist-info"
    torch.mkdir()

    def version_is(version: str) -> None:
        (torch / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    commands = []

    def run(command: list[str], check: bool) -> None:
        version_is(after)
        commands.append(command[3])

    version_is("2.10.0+cu126")
    (tmp_path / "lightning_rl-0.1.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(cells()["install"], {})
    assert commands == ["install", "uninstall"][: 1 + removed]
