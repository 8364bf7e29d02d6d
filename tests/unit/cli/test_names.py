"""Names of callbacks: each has one, and those that take part in a rerun say so."""

import subprocess
import sys
from pathlib import Path

import lightning_rl
from lightning_rl.callbacks import RLCallback
from lightning_rl.cli.rerun.rebuild import callbacks_that_rerun

IMPORTS = """
from lightning_rl.errors import LightningRLError
from lightning_rl.config.hints import import_object
for path in ("callbacks.evaluate.Evaluate", "callbacks.Evaluate"):
    try:
        import_object(path)
    except LightningRLError as error:
        print(error)
try:
    import callbacks.evaluate
except ImportError as error:
    print(error)
"""


def test_from_a_checkout_callbacks_have_one_name():
    """The folder callbacks/ is in the working directory, and so may be imported by that name."""
    checkout = Path(lightning_rl.__file__).parents[1]
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    refusals = done.stdout.splitlines()
    assert len(refusals) == 3
    for line in refusals:
        assert "callbacks/ is the package lightning_rl.callbacks" in line
        assert "from lightning_rl.callbacks import Evaluate" in line


def test_only_callbacks_that_say_so_take_part_in_a_rerun():
    class Ours(RLCallback):
        reruns = True

    ours = Ours()
    assert callbacks_that_rerun([RLCallback(), ours]) == [ours]
