"""Starts programs for a trainer, each under a keeper that ends it with everything it started.

    python launcher.py DESCRIPTOR alone|together [MODULE...]

DESCRIPTOR is a socket to the trainer. The named modules are imported first. Then each message asks
for one program, and brings five files: the request as JSON, standard input, output and error, and
a socket on which a keeper will answer.

A keeper is forked for each, tells which process it is, and forks the program. Programs that are
``alone`` are each in a namespace of processes, the first of which is its keeper: they see no other
program, whose environment holds a key, and cannot signal their keeper; and all ends with it. Where
the machine does not allow that, or ``together``, whatever a program starts and leaves behind
becomes the keeper's child, and that of a keeper which was killed the launcher's.

A keeper ends its program when the trainer says so, or is gone, and then tells how it ended. The
launcher ends with the trainer.

Only the standard library is imported, by any Python from 3.9 on: it may be another environment's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import resource
import runpy
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.run.processes import keeper as kept, namespaces
else:

    def _of_run(name: str) -> Any:
        """A module of ``lightning_rl.run.processes``, where that package cannot be imported."""
        path = os.path.join(os.path.dirname(__file__), "..", "run", "processes", f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"lightning_rl_run_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    kept, namespaces = _of_run("keeper"), _of_run("namespaces")

FILES = 5
"""What comes with each message."""
GRACE_S = 1.0
"""Seconds between SIGTERM, which a program may use to tidy up, and SIGKILL."""
_NO_SUCH_PROGRAM = 127  # as a shell says


def main() -> dict[str, Any] | None:
    """Serve until the trainer is gone; in a program's own process, return what it has to run."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    trainer = os.pidfd_open(os.getppid())
    alone = sys.argv[2] == "alone" and _can_be_alone()
    refusal = _import(sys.argv[3:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or what modules printed would be printed by each program again
    gc.freeze()  # memory shared with all programs is not scanned, hence not copied
    family = _Family(alone)
    while True:
        ready = kept.first_of([channel.fileno(), trainer, family.changes])
        if family.changes in ready:
            family.look_after()
        if trainer in ready:
            break
        if channel.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(channel, 1, FILES)
        if not message:
            break
        pid = os.fork()
        if pid == 0:
            channel.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(refusal, alone, trainer, *files)
        family.keepers.add(pid)
        for file in files:
            os.close(file)
    family.end()
    return None


class _Family:
    """The launcher's children: keepers, and leftovers of programs whose keeper was killed."""

    def __init__(self, alone: bool) -> None:
        self.keepers: set[int] = set()
        self._alone = alone
        self.changes, tell = os.pipe()
        for end in (self.changes, tell):
            os.set_blocking(end, False)
        if not alone:
            kept.adopt_orphans()
        self._own = set(kept.children())  # of modules that were imported
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def look_after(self) -> None:
        """Reap keepers that have ended, and end processes that lost theirs."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.changes, 4096)
        while True:
            self._kill(self._left())
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if ended == 0:
                return
            self.keepers.discard(ended)

    def end(self) -> None:
        """Return when nothing is left; keepers end by themselves, unless something stopped them."""
        until = time.monotonic() + 2 * GRACE_S
        while not self._alone and (self.keepers or self._left()):
            if time.monotonic() > until:
                self._kill(self.keepers)
            kept.first_of([self.changes], 0.1)
            self.look_after()

    def _left(self) -> set[int]:
        """Leftovers of programs whose keeper is gone."""
        return set() if self._alone else {*kept.children()} - self.keepers - self._own

    def _kill(self, processes: set[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _import(modules: list[str]) -> str:
    """Import them all; returns why that failed, or nothing."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything; the trainer hears of it
            return f"cannot import {name!r}: {type(error).__name__}: {error}"
    return ""


def _can_be_alone() -> bool:
    """Tell if programs can have namespaces of processes here: a child tries."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(OSError):
            namespaces.leave_processes()
            first = os.fork()
            if first == 0:
                with contextlib.suppress(OSError):
                    namespaces.mount_own_processes()
                    status = 0
            else:
                status = os.waitpid(first, 0)[1]
        os._exit(int(status != 0))
    return os.waitpid(pid, 0)[1] == 0


# ---------------------------------------------------------------- the keeper


def _keep(
    refusal: str,
    alone: bool,
    trainer: int,
    request: int,
    stdin: int,
    stdout: int,
    stderr: int,
    control: int,
) -> dict[str, Any]:
    """Watch over a program to its end, and exit; returns only in the program's own process."""
    if refusal:
        _tell(control, {"refused": refusal})
        os._exit(1)
    os.setsid()  # out of reach for Ctrl-C in a terminal
    own_user = False
    if alone:
        own_user = _go_in(control)
    else:
        _tell(control, {"keeper": os.getpid()})
    kept.keep_others_out()
    kept.adopt_orphans()
    with os.fdopen(request, "rb") as asked_for:
        wanted: dict[str, Any] = json.load(asked_for)
    trouble, tell = os.pipe()
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        for file in (control, trouble, trainer):
            os.close(file)
        _become(wanted, (stdin, stdout, stderr), tell, keeper, own_user)
        return wanted
    for file in (stdin, stdout, stderr, tell):
        os.close(file)
    asked = _wait(program, control, trainer)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-program, signal.SIGKILL)  # its group at once, which cannot fork meanwhile
    status = kept.end_all(program)
    printed = os.read(trouble, 65536).decode(errors="replace")
    _tell(control, {"status": status, "asked": asked, "error": printed})
    os._exit(0)


def _go_in(control: int) -> bool:
    """Continue as the first process of a new namespace; whether it is one of users too."""
    own_user = namespaces.leave_processes()
    told, telling = os.pipe()
    first = os.fork()
    if first:
        _tell(control, {"keeper": first, "alone": True})  # inside it does not know its number
        os.close(telling)
        os.waitpid(first, 0)
        os._exit(0)
    os.close(telling)
    os.read(told, 1)  # a short program must not be over before the trainer hears of its keeper
    os.close(told)
    namespaces.mount_own_processes()
    return own_user


def _tell(control: int, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(control, json.dumps(answer).encode())


def _wait(program: int, control: int, trainer: int) -> bool:
    """Return when it has ended, or is to end; whether the latter."""
    ended = os.pidfd_open(program)
    if ended in kept.first_of([ended, control, trainer]):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGTERM)
    kept.first_of([ended], GRACE_S)
    return True


# ---------------------------------------------------------------- the program


def _become(
    wanted: dict[str, Any], files: tuple[int, ...], tell: int, keeper: int, own_user: bool
) -> None:
    """Be the program: its files, directory, limits, and its command unless Python runs it here."""
    try:
        os.setsid()  # its own group, which it may signal without reaching the keeper
        if own_user:
            namespaces.drop_capabilities()
        kept.keep_others_out(False)
        kept.die_with_parent()
        if os.getppid() != keeper:
            os._exit(0)
        for index, file in enumerate(files):
            os.dup2(file, index)
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
    """Do what ``python SCRIPT ARGUMENTS`` does, with the modules that are imported already."""
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
