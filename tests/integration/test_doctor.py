"""Test the doctor as a process of its own."""

import subprocess
import sys
from importlib import metadata

import pytest

HEAVY = ("vllm", "ray", "torchrl", "gymnasium", "openai")


@pytest.mark.slow
def test_vllm_version_is_read_without_importing_it_or_what_else_is_heavy():
    command = (
        "import sys, lightning_rl;"
        "from lightning_rl.run.processes.machine import read_vllm_version as r;"
        f"print(r(), lightning_rl.RayEngine and any(m in sys.modules for m in {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    # Either distribution gives the package vllm; none is installed only where there is no engine.
    names = metadata.packages_distributions().get("vllm")
    expected = metadata.version(names[0]) if names else "None"
    assert done.stdout.split() == [expected, "False"]


def test_exit_code_is_1_only_for_serious_problems():
    # A serious fault planted for real: a metadata folder that shadows the installed lightning.
    code = (
        "import sys, pathlib, tempfile\n"
        "info = pathlib.Path(tempfile.mkdtemp(), 'lightning-2.6.2.dist-info'); info.mkdir()\n"
        "(info / 'METADATA').write_text('Name: lightning\\nVersion: 2.6.2\\n')\n"
        "sys.path.insert(0, str(info.parent))\n"
        "from lightning_rl.cli.check.doctor import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "PROBLEM  lightning" in done.stdout
