"""Starts a process for each program under test, and reads its verdict."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.program_tests import BEGUN
from lightning_rl.rewards.sandbox import FILES_MB, MAX_PROCESSES, installed, sandboxed
from lightning_rl.run.processes.child import Child, last_lines

_LIBRARY = str(Path(__file__).parents[1])
_KEPT_ENVIRONMENT = {"PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH"}
_READ = 65536  # bytes of a verdict, or of why there is none

# The packages themselves are not imported: that would take as long as all the rest.
_START = """
import sys, types
for name in ("", ".rewards", ".run", ".run.processes"):
    package = sys.modules["lightning_rl" + name] = types.ModuleType("lightning_rl" + name)
    package.__path__ = [sys.argv[2] + name.replace(".", "/")]
from lightning_rl.rewards.program_tests import main
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_rl"]:
    del sys.modules[name]
main()
"""


@dataclass(frozen=True)
class ProgramJudge:
    """Judges programs by tests, each in a process that no other shares."""

    timeout_s: float
    memory_mb: int
    sandbox: bool

    def __post_init__(self) -> None:
        if self.sandbox:
            sandboxed([])  # else it is refused only after the first generation

    def score(self, program: str, tests: str | list[str]) -> Score:
        """Return 1.0 if the program passes all tests, else 0.0; a failure if it was not judged."""
        texts = [tests] if isinstance(tests, str) else tests
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return RewardFailure(f"tests={tests!r:.100} must be a string or a list of strings")
        # A file, not a pipe: nothing waits for its reader.
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps({"program": program, "tests": texts}).encode())
            request.seek(0)
            with tempfile.TemporaryDirectory(prefix="lightning_rl_reward_") as home:
                return self._run(home, request.fileno())

    def _run(self, home: str, request: int) -> Score:
        folder = "/tmp" if self.sandbox else home
        env = {k: v for k, v in os.environ.items() if k in _KEPT_ENVIRONMENT}
        process = Child(
            self._command(folder),
            env | {"OMP_NUM_THREADS": "1", "HOME": folder, "TMPDIR": folder},
            stdin=request,
            log=True,
            keeper=not self.sandbox,
        )
        try:
            in_time = process.ended_within(self.timeout_s)
        finally:
            process.kill()
        return self._verdict(process.printed(_READ).decode(errors="replace"), in_time)

    def _command(self, place: str) -> list[str]:
        readable = tuple(f"{place}/" for place in installed())
        limits = {
            # Anything else may be where the program can write, and is what its judge would import.
            "path": [entry for entry in sys.path if f"{entry}/".startswith(readable)],
            "directory": place,
            "memory_mb": self.memory_mb,
            "files_mb": FILES_MB,
            # Counted per user and sandbox; outside it would count everything the user runs.
            "processes": MAX_PROCESSES if self.sandbox else None,
        }
        python = os.path.realpath(sys.executable)
        command = [python, "-I", "-S", "-c", _START, json.dumps(limits), _LIBRARY]
        return sandboxed(command, [_LIBRARY]) if self.sandbox else command

    def _verdict(self, said: str, in_time: bool) -> Score:
        before, begun, verdict = said.partition(BEGUN)
        if not begun:
            late = "" if in_time else f" within timeout_s={self.timeout_s:g}"
            return RewardFailure(f"its process did not start{late}{last_lines(before.encode())}")
        if not verdict:  # killed: it took too long, or broke a limit
            return 0.0
        answer = json.loads(verdict)
        return RewardFailure(answer["failure"]) if "failure" in answer else float(answer["passed"])
