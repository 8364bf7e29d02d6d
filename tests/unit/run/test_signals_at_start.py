"""A signal while a run starts ends the command with its own message, whoever catches it first."""

import os
import signal
import time
from contextlib import suppress

import pytest

from lightning_rl.errors import RunInterrupted
from lightning_rl.run.loop import interrupts
from lightning_rl.run.loop.interrupts import Interrupts, stopped_while_starting


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError("nobody listened")


@pytest.mark.parametrize("error", [TypeError, SystemExit])
def test_a_parser_that_takes_it_for_its_own_error_does_not_hide_it(error):
    interrupted = pytest.raises(RunInterrupted, match="SIGUSR1 came while the run")
    with interrupted as caught, stopped_while_starting():
        try:
            send()
        except RunInterrupted as stopped:
            raise error("fits no type of the union") from stopped
    assert caught.value.status == 128 + signal.SIGUSR1
    assert caught.value.__cause__ is None


def test_a_run_does_not_begin_where_it_was_swallowed():
    of_run = Interrupts()
    with stopped_while_starting():
        with suppress(RunInterrupted):
            send()
        with pytest.raises(RunInterrupted, match="SIGUSR1 came while the run was starting"):
            of_run.install(lambda: False)


def test_an_error_of_a_start_without_signals_stays_as_it_is():
    with pytest.raises(TypeError, match="another"), stopped_while_starting():
        raise TypeError("another")


def test_a_signal_of_an_earlier_start_does_not_end_a_later_one(monkeypatch):
    """A run's own handlers heard it, but the later start has those of every start again."""
    monkeypatch.setattr(interrupts, "_HEARD_S", 0.2)
    with stopped_while_starting():
        signal.signal(signal.SIGTERM, lambda *_: None)  # as a run does
        os.kill(os.getpid(), signal.SIGTERM)
    with stopped_while_starting():
        time.sleep(0.5)  # else the process would end here
