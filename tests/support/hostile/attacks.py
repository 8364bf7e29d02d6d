"""Programs that would spoil the judging of those after them: by limits, files, signals, memory.

None answers anything, so none is to be paid; and whatever runs beside them or afterwards is to be
judged as if they had not been.
"""

_EVERYBODY = """
import ctypes, os, resource, signal
everybody = [*range(-1, 200), os.getppid(), *(int(p) for p in os.listdir("/proc") if p.isdigit())]
def each(work):
    for process in everybody:
        if process not in (0, os.getpid()):
            try:
                work(process)
            except (OSError, ValueError):
                pass
"""
_LIMIT = "each(lambda p: p > 0 and resource.prlimit(p, resource.RLIMIT_{}, ({}, {})))\n"
_SIGNAL = "each(lambda p: os.kill(p, signal.{}))\n"


def _limits(kind: str, bound: int) -> str:
    return _EVERYBODY + _LIMIT.format(kind, bound, bound)


def _signals(name: str) -> str:
    return _EVERYBODY + _SIGNAL.format(name)


_FILLS = """
import os
home = os.environ["HOME"]
for place in (".", "..", home, os.path.dirname(home), "/tmp", "/dev/shm"):
    try:
        {work}
    except OSError:
        pass
"""

ATTACKS: dict[str, str] = {
    # ------------------------------------------------ limits
    "lets nobody write files": _limits("FSIZE", 0),
    "lets nobody open files": _limits("NOFILE", 3),
    "lets nobody start processes": _limits("NPROC", 0),
    "leaves nobody memory": _limits("AS", 2**20),
    "leaves nobody time": _limits("CPU", 0),
    # ------------------------------------------------ files
    "fills what can be written": _FILLS.format(
        work="open(os.path.join(place, 'full'), 'wb').write(bytes(2**27))"
    ),
    "makes files until there are no more": _FILLS.format(
        work="[open(os.path.join(place, f'f{i}'), 'w').close() for i in range(5000)]"
    ),
    "forbids all directories": _FILLS.format(work="os.chmod(place, 0)"),
    "writes to every open file": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x' * 70000)\n"
        "    except OSError: pass\n"
    ),
    # ------------------------------------------------ signals
    "kills everybody": _signals("SIGKILL"),
    "interrupts everybody": _signals("SIGINT"),
    "stops everybody": _signals("SIGSTOP"),
    # ------------------------------------------------ memory and the machine
    "takes all memory": (
        "import os\nos.fork()\nheld = []\nwhile True: held.append(bytearray(2**24))\n"
    ),
    "forks until it may not": (
        "import os\nfor _ in range(12):\n    try: os.fork()\n    except OSError: pass\n"
    ),
    "leaves shared memory, and lets everybody wait for a core": (
        _EVERYBODY
        + "libc = ctypes.CDLL(None)\n"
        + "for key in range(1, 4097): libc.shmget(key, 2**20, 0o1666)\n"
        + "each(lambda p: p > 0 and os.setpriority(os.PRIO_PROCESS, p, 19))\n"
        + "each(lambda p: p > 0 and os.sched_setaffinity(p, {0}))\n"
        + "os.setpriority(os.PRIO_USER, 0, 19)\n"
    ),
}
"""Each attack by what it would do, with its program."""

HONEST = """
import os, subprocess, tempfile
def add(a, b):
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(2**20))
    assert len(bytearray(2**26)) == 2**26
    subprocess.run(["true"], check=True)
    return a + b
"""
"""A right program, which needs a file, memory and a process for it."""
TESTS = "assert add(1, 2) == 3\n"
