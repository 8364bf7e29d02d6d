"""A signal while a run starts ends the command with its own message, whoever catches it first."""

import os
import signal
from contextlib import suppress

import pytest

from lightning_rl.errors import RunInterrupted
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
    interrupts = Interrupts()
    with stopped_while_starting():
        with suppress(RunInterrupted):
            send()
        with pytest.raises(RunInterrupted, match="SIGUSR1 came while the run was starting"):
            interrupts.install(lambda: False)


def test_an_error_of_a_start_without_signals_stays_as_it_is():
    with pytest.raises(TypeError, match="another"), stopped_while_starting():
        raise TypeError("another")
