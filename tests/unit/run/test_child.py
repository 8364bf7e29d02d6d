"""Child processes: how they start, what is told of their end, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from shlex import quote

import pytest

from lightning_rl.run.processes.child import Child, PythonChild, ending, last_lines
from tests.support.engine_checks import is_running, wait_for


def shell(text: str, **options) -> Child:
    return Child(["/bin/sh", "-c", text], **options)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("exit 3", "ended with exit status 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("kill -40 $$", "was killed by signal 40"),
        ("exec /no/such/program", "ended with exit status 127"),
    ],
)
def test_how_a_child_ended_is_told(command, told):
    child = shell(command)
    assert child.ended_within(60)
    assert not child.running
    assert child.status is not None
    assert ending(child.status) == told


def test_the_end_of_what_it_printed_is_kept():
    child = shell("echo one; echo; echo two >&2; echo three", log=True)
    assert child.ended_within(60)
    assert child.printed(1000) == b"one\n\ntwo\nthree\n"
    assert child.printed(6) == b"three\n"
    assert last_lines(child.printed(1000), 2) == ": two | three"
    assert last_lines(b" \n") == ""


@pytest.mark.parametrize("hinders", ["", "kill -STOP $PPID; ", "trap '' TERM HUP; "])
def test_a_kill_leaves_nothing_even_where_its_keeper_was_stopped(hinders, tmp_path):
    there = tmp_path / "pid"
    child = shell(f"setsid sleep 600 & echo $! > {quote(str(there))}; {hinders}sleep 600")
    wait_for(lambda: there.exists() and there.read_text())
    assert not child.ended_within(0)
    child.kill()
    assert not child.running
    wait_for(lambda: not is_running(int(there.read_text())))  # killed, it ends when it has a core


def test_a_kill_leaves_nothing_where_the_keeper_itself_was_killed(tmp_path):
    there = tmp_path / "pid"
    child = shell(f"setsid sleep 600 & echo $! > {quote(str(there))}; sleep 600")
    wait_for(lambda: there.exists() and there.read_text())
    os.kill(child.pid, signal.SIGKILL)
    assert child.ended_within(60)
    assert is_running(int(there.read_text()))
    child.kill()
    wait_for(lambda: not is_running(int(there.read_text())))


SHARES = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=8)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_a_killed_command_leaves_no_shared_memory():
    child = Child([sys.executable, "-c", SHARES], log=True)
    wait_for(lambda: child.printed(100).endswith(b"\n"))
    memory = Path("/dev/shm", child.printed(100).decode().strip())
    assert memory.exists()
    child.kill()
    assert not memory.exists()


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Import a function of a module that is found because of this process's ``sys.path``."""
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def answer(connection, name):\n"
        "    connection.send((name, sys.argv))\n"
        "    connection.send_bytes(connection.recv_bytes())\n"
        "    raise SystemExit(7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return import_module("mine").answer


def test_a_child_calls_a_function_with_a_connection(function):
    child = PythonChild(function, "Ada")
    assert child.connection.recv() == ("Ada", ["-c"])
    child.connection.send_bytes(b"back")
    assert child.connection.recv_bytes() == b"back"
    assert child.ended_within(60)
    assert child.status == 7
    child.kill()
    assert child.connection.closed


def test_it_hears_that_its_connection_was_closed(function):
    child = PythonChild(function, "Ada", stdout=subprocess.DEVNULL, log=True)
    child.connection.recv()
    child.connection.close()
    assert child.ended_within(60)
    assert child.status == 1
    assert last_lines(child.printed(1000), 1) == ": EOFError"
