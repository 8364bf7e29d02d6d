"""The process of a local fine-tuning job: it runs a command and stores its result.

  python job_process.py DIRECTORY COMMAND...

It outlives the process that started it. The command holds the lock that this process was started
with, too, until both have ended. ``result.json`` is written last, once everything else is in place.
Only the standard library is imported, so that it starts at once.
"""

import json
import os
import signal
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

MODEL, PARTIAL = "model", "model.partial"
RESULT, PID, LOG, STARTS = "result.json", "pid", "log.txt", "starts"


def run(directory: Path, command: list[str]) -> None:
    """Run the command, move the model to its place, and write the result."""
    (directory / PID).write_text(str(os.getpid()))
    with (directory / STARTS).open("a") as starts:
        starts.write(".")
    with (directory / LOG).open("w") as log:
        lock = int(os.environ["LIGHTNING_RL_JOB_LOCK"])
        # With this process all is gone that the command has started.
        kept = _keeper().kept(command, told=signal.SIGKILL, grace_s=0)
        status = subprocess.run(
            kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock], check=False
        ).returncode
    partial = directory / PARTIAL
    if status == 0 and partial.is_dir():
        os.sync()  # what is in its files, before its name
        partial.rename(directory / MODEL)
        write_result(directory, "succeeded")
    else:
        write_result(directory, "failed", _why(status, directory / LOG))


def _keeper() -> Any:
    """Load the keeper module by its path, because importing the package would take much longer."""
    path = Path(__file__).parents[2] / "run" / "processes" / "keeper.py"
    spec = spec_from_file_location("keeper", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_result(directory: Path, status: str, error: str = "") -> None:
    """Write the result atomically and durably."""
    partial = directory / f"{RESULT}.partial"
    with partial.open("w") as file:
        json.dump({"status": status, "error": error}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / RESULT)


def _why(status: int, log: Path) -> str:
    """Return how the command ended, and the last lines that it printed."""
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    lines = log.read_text(errors="replace").splitlines()
    printed = [line.strip() for line in lines if line.strip()]
    return f"ended with {ended}: {' | '.join(printed[-3:]) or 'it printed nothing'}"


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
