"""An interpreter that libraries fail in is told, with what to set."""

import os
import subprocess
import sys

import pytest

PLAIN = {"PYTHONOPTIMIZE": "", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "1"}
CASES = {
    "-OO": (["-OO"], {}, "-OO (PYTHONOPTIMIZE=2), which removes the docstrings"),
    "PYTHONOPTIMIZE": ([], {"PYTHONOPTIMIZE": "2"}, "run it with -O, or without"),
    "no UTF-8": ([], {"PYTHONUTF8": "0"}, "set PYTHONUTF8=1, or a locale"),
    "UTF-8 by its locale": ([], {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}, None),
    "-O": (["-O"], {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interpreter_that_libraries_fail_in_is_refused(case, tmp_path):
    options, variables, words = CASES[case]
    command = [sys.executable, *options, "-B", "-m", "lightning_rl", "nonsense"]
    ran = subprocess.run(
        command, env=os.environ | PLAIN | variables, cwd=tmp_path, capture_output=True, check=False
    )
    said = ran.stderr.decode()
    assert ran.returncode == 2
    assert "Traceback" not in said
    assert (words or "no command 'nonsense'") in said
