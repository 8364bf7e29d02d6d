"""Kills a staged run with SIGKILL at its n-th request, lets it go on, and says what came of it.

    python -m tests.support.staged_kills OUT STEP

A run is a process, and so is the server, which sends the signal: before it does what is asked, or
after, and before it answers. Points are all around the creation of jobs, and every STEP-th of the
others. The last line is JSON.
"""

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.staged_kill import results
from tests.support.openai_server import OpenAIServer
from tests.support.staged_runs import staged

CREATION = "POST /v1/fine_tuning/jobs"


class KillingServer(OpenAIServer):
    """Kills a client once, at a request: ``point`` 2n before the n-th is done, 2n + 1 after it."""

    def __init__(self, point: int, pid_file: Path) -> None:
        super().__init__()
        self.point, self.pid_file = point, pid_file
        self.passed: list[str] = []

    def done(self, *asked: Any) -> Any:
        if asked[1] == "/v1/requests":  # of ours, in the end
            return {"passed": self.passed}
        self._pass(f"{asked[0]} {asked[1]}")
        answer = super().done(*asked)
        self._pass(f"{asked[0]} {asked[1]}")
        return answer

    def _pass(self, request: str) -> None:
        if len(self.passed) == self.point:
            os.kill(int(self.pid_file.read_text()), signal.SIGKILL)
        self.passed.append(request)


def in_child(work: Callable[[], None]) -> int:
    """Run in a process of its own; its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def killed_at(point: int, out: Path) -> dict[str, Any]:
    """Return what comes of a run that is killed at a point (-1: never), and goes on."""
    out.mkdir(parents=True)
    server = KillingServer(point, out / "pid")
    serving = in_child(server.serve_forever)
    url, starts, status = server.url, 0, -1
    server.server_close()

    def run() -> None:
        (out / "pid").write_text(str(os.getpid()))
        staged(out, url).fit()

    try:
        while status != 0:
            starts += 1
            _, status = os.waitpid(in_child(run), 0)
            if status not in (0, signal.SIGKILL):
                raise SystemExit(f"point {point}: the run ended with status {status}")
        requests = get(f"{url}/requests")["passed"]  # not the next, of ours
        jobs = get(f"{url}/fine_tuning/jobs?limit=100")["data"]
    finally:  # it has our output, for whose end the caller waits
        os.kill(serving, signal.SIGKILL)
        os.waitpid(serving, 0)
    return {
        "starts": starts,
        "requests": requests,
        "jobs": [job["user_provided_suffix"].partition("-")[2] for job in jobs],
        "results": results(out),
    }


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def main() -> int:
    out, step = Path(sys.argv[1]), int(sys.argv[2])
    whole = killed_at(-1, out / "whole")
    passed = enumerate(whole["requests"])
    points = [n for n, name in passed if name == CREATION or n % step == step // 2]
    unequal, repeated = [], 0
    for point in points:
        killed = killed_at(point, out / str(point))
        repeated += len(killed["jobs"]) - len(set(killed["jobs"]))
        wrong = killed["starts"] != 2 or killed["jobs"] != whole["jobs"]
        if wrong or killed["results"] != whole["results"]:
            unequal.append(point)
    told = {"points": len(points), "unequal": unequal, "jobs_repeated": repeated}
    print(json.dumps(told))
    return bool(unequal or repeated)


if __name__ == "__main__":
    sys.exit(main())
