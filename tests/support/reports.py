"""What a test run says besides pytest's own report: failures at once, and seconds of each file."""

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / ".ci" / "durations.txt"
"""Worker seconds of each test file in the last ``make test-all``, the slowest first."""


class FailuresAtOnce:
    """Names a test as soon as it fails: a run that is ended from outside prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            lines = str(report.longrepr).splitlines() or [""]
            why = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
            terminal.write_line(f"\nfailed: {report.nodeid} ({report.when}): {why[:300]}")
            terminal.flush()


class FileDurations:
    """Sums the seconds of set-up, call and tear-down by file, and notes them at the end.

    Rows of files that this run did not execute stay, as long as there is such a file: units and
    integration tests are two runs. The first line names the commit that was tested.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = read_durations(self.path) | self.seconds
        rows = {file: seconds for file, seconds in rows.items() if (ROOT / file).exists()}
        commit = (git("rev-parse", "--short=12", "HEAD") or "unknown").strip()
        self.path.write_text(durations_text(commit, rows), encoding="utf-8")


def durations_text(commit: str, rows: dict[str, float]) -> str:
    """The table that ``read_durations`` reads."""
    ordered = sorted(rows.items(), key=lambda row: (-row[1], row[0]))
    head = f"# Worker seconds by file in the last `make test-all`, of commit {commit}.\n"
    total = f"# {sum(rows.values()):.0f} in {len(rows)} files.\n"
    return head + total + "".join(f"{seconds:8.1f}  {file}\n" for file, seconds in ordered)


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Worker seconds by test file; empty if there is no table yet."""
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text("utf-8").splitlines() if line[:1] != "#"]
    return {file: float(seconds) for seconds, file in lines}


def git(*words: str) -> str | None:
    """Return what a git command prints of this checkout; None if it fails."""
    command = ["git", "-c", "safe.directory=*", *words]  # the checkout may be somebody else's
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return None if done.returncode else done.stdout
