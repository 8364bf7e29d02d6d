"""OpenMP's threads stop spinning while other processes want their cores.

A thread that waits for the others of its team spins, which is fastest on a quiet machine. Beside a
busy process it burns the turns of the thread that it waits for: an iteration takes many times as
long. How long libgomp spins is fixed when it is loaded, but 300 times shorter as soon as a process
has more of its threads than there are cores (its "throttled spin count"). A team that only sleeps
makes it so, and the end of that team undoes it. Measured: `python -m benchmarks.neighbours`.
"""

import ctypes
import logging
import os
import threading
from pathlib import Path

_log = logging.getLogger(__name__)

EVERY_S = 1.0
CROWDED, FREE = 0.10, 0.05
"""Of the time in which this process's threads could run, the share in which they waited for a core:
0.01 on a quiet machine, 0.35 where two threads share two cores with one busy process."""
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_TASKS = Path("/proc/self/task")


def stop_spinning_when_crowded() -> None:
    """Watch over this process from now on, in a thread; once, however often it is called.

    Nothing is watched where the user chose how threads wait (``GOMP_SPINCOUNT`` or
    ``OMP_WAIT_POLICY``), where torch computes without libgomp, or without Linux's ``schedstat``.
    """
    if _watches or any(name in os.environ for name in _CHOSEN):
        return
    libraries = loaded_libgomps()
    if libraries and _read_schedstat():
        _watches.append(threading.Thread(target=_watch, args=(libraries,), daemon=True))
        _watches[0].start()


_watches: list[threading.Thread] = []
os.register_at_fork(after_in_child=_watches.clear)  # a child has none of its parent's threads


def loaded_libgomps() -> list[ctypes.CDLL]:
    """Each copy of libgomp in this process: torch brings its own, other packages may too."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return [ctypes.CDLL(path) for path in sorted(paths) if "libgomp" in Path(path).name]


class WaitingShare:
    """How much of the time in which they could run did this process's threads wait for a core?"""

    def __init__(self) -> None:
        self._before = _read_schedstat()

    def since_last(self) -> float:
        """Between 0 and 1; 0 if no thread ran."""
        before, self._before = self._before, _read_schedstat()
        ran = waited = 0
        for thread, (run_ns, delay_ns) in self._before.items():
            old = before.get(thread, (0, 0))
            ran, waited = ran + run_ns - old[0], waited + delay_ns - old[1]
        return waited / (ran + waited) if ran + waited else 0.0


def _read_schedstat() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of this process ran, and waited for a core, so far."""
    found = {}
    for thread in _TASKS.glob("*"):
        try:
            ran, waited, _ = (thread / "schedstat").read_text(encoding="ascii").split()
        except OSError:  # the thread has ended, or the kernel does not count
            continue
        found[thread.name] = int(ran), int(waited)
    return found


class SleepingTeam:
    """More threads of each libgomp than there are cores; they sleep until ``end``."""

    def __init__(self, libraries: list[ctypes.CDLL]) -> None:
        self._over = threading.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._sleep, args=(libraries, started), daemon=True)
        self._thread.start()
        started.wait()

    def _sleep(self, libraries: list[ctypes.CDLL], started: threading.Event) -> None:
        # A team lives as long as the thread that has used it; any function without effect will do.
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        size = ctypes.c_uint(len(os.sched_getaffinity(0)) + 1)
        for library in libraries:
            library.GOMP_parallel(nothing, None, size, ctypes.c_uint(0))
        started.set()
        self._over.wait()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _watch(libraries: list[ctypes.CDLL]) -> None:
    share, team = WaitingShare(), None
    pause = threading.Event()
    while not pause.wait(EVERY_S):
        waited = share.since_last()
        if team is None and waited > CROWDED:
            team = SleepingTeam(libraries)
            _log.info("other processes want the cores: threads sleep where they wait")
        elif team is not None and waited < FREE:
            team.end()
            team = None
