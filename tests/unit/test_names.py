"""Names of earlier releases: refused with the new name said, and still read in recorded runs."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_rl
import lightning_rl.callbacks
from lightning_rl.callbacks import RLCallback
from lightning_rl.cli import main
from lightning_rl.cli.rerun.rebuild import callbacks_that_rerun
from lightning_rl.config.hints import named_class
from lightning_rl.config.names import MODULE_OF, RENAMED, with_new_names
from lightning_rl.errors import ConfigError
from lightning_rl.rollouts.log import RerunLog


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_wherever_it_is_used(old):
    new = RENAMED[old]
    assert new in MODULE_OF
    words = f"{old} is now called {new}; write that instead"
    with pytest.raises(ConfigError, match=words):
        getattr(lightning_rl, old)
    kind = getattr(lightning_rl, new).__mro__[-2]
    for name in (old, f"lightning_rl.{old}", f"lightning_rl.anywhere.{old}"):
        with pytest.raises(ConfigError, match=words):
            named_class(name, [kind])


def test_callbacks_refuse_it_too():
    with pytest.raises(ConfigError, match="ReplayRecorder is now called RerunRecorder"):
        from lightning_rl.callbacks import ReplayRecorder  # noqa: F401
    with pytest.raises(AttributeError, match=r"callbacks' has no attribute 'Replay'"):
        lightning_rl.callbacks.__getattr__("Replay")


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


def test_recorded_configurations_are_read_with_new_names():
    for old in ("ReplayRecorder", "lightning_rl.ReplayRecorder", "lightning_rl.a.b.ReplayRecorder"):
        assert with_new_names(f"- class_path: {old}\n") == "- class_path: RerunRecorder\n"
    for other in ("mine.ReplayRecorder", "ReplayRecorders", "MyReplayRecorder"):
        assert with_new_names(other) == other


def test_the_command_says_what_it_is_called_now(capsys):
    assert main(["replay", "runs/version_0", "--iteration", "1"]) == 2
    assert "lightning-rl replay is now called lightning-rl rerun" in capsys.readouterr().err


def test_a_callback_that_would_be_left_out_of_a_rerun_is_refused():
    class Mine(RLCallback):
        replays = True

    class Ours(RLCallback):
        reruns = True

    ours = Ours()
    assert callbacks_that_rerun([RLCallback(), ours]) == [ours]
    with pytest.raises(ConfigError, match=r"Mine\.replays is now called reruns; write that"):
        callbacks_that_rerun([ours, Mine()])


def test_logs_of_earlier_releases_are_found(tmp_path):
    assert RerunLog(tmp_path).path == tmp_path / "rerun"
    (tmp_path / "replay").mkdir()
    assert RerunLog(tmp_path).path == tmp_path / "replay"
