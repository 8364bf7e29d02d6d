"""Starts programs for a trainer, each under a keeper that ends it with all that it started.

    python launcher.py DESCRIPTOR [MODULE...]

DESCRIPTOR is a socket to the trainer. The named modules are imported first. Then each message asks
for one program, and brings five files: the request as JSON, standard input, output and error, and
a socket on which a keeper will answer.

A keeper is forked for each, says ``{}``, and forks the program. Whatever a program starts and
leaves behind becomes the keeper's child, so it finds all of it, also what left the process group.
It ends the program when the trainer says so, or is gone, and then tells how it ended. The launcher
ends with the trainer.

Only the standard library is imported, by any Python from 3.9 on: it may be another environment's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from typing import Any

FILES = 5
"""What comes with each message."""
GRACE_S = 1.0
"""Seconds between SIGTERM, which a program may use to tidy up, and SIGKILL."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_NO_SUCH_PROGRAM = 127  # as a shell says

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> dict[str, Any] | None:
    """Serve until the trainer is gone; in a program's own process, return what it has to run."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    refusal = _import(sys.argv[2:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or what modules printed would be printed by each program again
    gc.freeze()  # what is shared with all programs is not looked through, hence not copied
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1, FILES)
        if not message:
            return None
        if os.fork() == 0:
            channel.close()
            return _keep(refusal, *files)
        for file in files:
            os.close(file)


def _import(modules: list[str]) -> str:
    """Import them all; returns why that failed, or nothing."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything; the trainer is told
            return f"cannot import {name!r}: {type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------- the keeper


def _keep(
    refusal: str, request: int, stdin: int, stdout: int, stderr: int, control: int
) -> dict[str, Any]:
    """Watch over a program to its end, and exit; returns only in the program's own process."""
    _tell(control, {"refused": refusal} if refusal else {})
    if refusal:
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # out of reach for Ctrl-C in a terminal
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with os.fdopen(request, "rb") as asked_for:
        wanted: dict[str, Any] = json.load(asked_for)
    trouble, tell = os.pipe()
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        os.close(control)
        os.close(trouble)
        _become(wanted, (stdin, stdout, stderr), tell, keeper)
        return wanted
    for file in (stdin, stdout, stderr, tell):
        os.close(file)
    asked = _wait(program, control)
    status = _end_all(program)
    said = os.read(trouble, 65536).decode(errors="replace")
    _tell(control, {"status": status, "asked": asked, "error": said})
    os._exit(0)


def _tell(control: int, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody there any more
        os.write(control, json.dumps(answer).encode())


def _wait(program: int, control: int) -> bool:
    """Return when it has ended, or is to end; whether the latter."""
    ended = os.pidfd_open(program)
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(control, select.POLLIN)
    if ended in dict(watched.poll()):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGTERM)
    watched.unregister(control)
    watched.poll(GRACE_S * 1000)
    return True


def _end_all(program: int) -> int:
    """Kill and reap everything below this process; the program's wait status.

    A killed process's children become ours, so this ends only when there is none left.
    """
    _kill(-program)  # its group at once, which cannot fork meanwhile
    status = 0
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            for child in children.read().split():
                _kill(int(child))
        try:
            ended, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == program:
            status = code


def _kill(process: int) -> None:
    # It may have just ended, or have become another user's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


# ---------------------------------------------------------------- the program


def _become(wanted: dict[str, Any], files: tuple[int, ...], tell: int, keeper: int) -> None:
    """Be the program: its files, directory, limits, and its command unless Python runs it here."""
    try:
        os.setsid()  # a group of its own, which it may signal without reaching the keeper
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(0)
        for place, file in enumerate(files):
            os.dup2(file, place)
            os.close(file)
        os.chdir(wanted["cwd"])
        _limit(wanted["memory_bytes"])
        if wanted["command"]:
            os.execvpe(wanted["command"][0], wanted["command"], wanted["env"])
    except (OSError, ValueError) as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(_NO_SUCH_PROGRAM)
    os.close(tell)


def _limit(memory_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out, the kernel takes programs, not the trainer


def _run_script(wanted: dict[str, Any]) -> None:
    """What ``python SCRIPT ARGUMENTS`` does, with the modules that are imported already."""
    os.environ.clear()
    os.environ.update(wanted["env"])
    script = wanted["script"]
    sys.argv = [script, *wanted["arguments"]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        del sys.path[0]  # this file's directory
    if (program := main()) is not None:
        _run_script(program)
