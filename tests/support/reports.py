"""Report failures at once, and the seconds of each file, beside pytest's own report."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / ".ci" / "durations.txt"
"""Worker seconds of each test file in the last ``make test-all``, the slowest first."""
LONG = 60.0
"""Worker seconds above which a file of tests says why it takes them."""


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
    integration tests are two runs. The first line names the commit that was tested. Long files that
    do not say why are named after the run: a busy machine makes any file long, so none fails.
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

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in unexplained(self.seconds):
            terminalreporter.write_line(line)


def unexplained(rows: Mapping[str, float], root: Path = ROOT) -> list[str]:
    """Name the long files whose docstring has no line that begins with ``Slow: ``."""
    found = []
    for file, seconds in rows.items():
        if seconds > LONG and (root / file).exists():
            told = ast.get_docstring(ast.parse((root / file).read_text("utf-8"))) or ""
            if not any(line.startswith("Slow: ") for line in told.splitlines()):
                found.append(
                    f"{file} took {seconds:.0f} s; let a line 'Slow: ...' of its docstring say why"
                )
    return found


def durations_text(commit: str, rows: dict[str, float]) -> str:
    """Return the table that ``read_durations`` reads."""
    ordered = sorted(rows.items(), key=lambda row: (-row[1], row[0]))
    head = f"# Worker seconds by file in the last `make test-all`, of commit {commit}.\n"
    total = f"# {sum(rows.values()):.0f} in {len(rows)} files.\n"
    return head + total + "".join(f"{seconds:8.1f}  {file}\n" for file, seconds in ordered)


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Return worker seconds by test file; empty if there is no table yet."""
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text("utf-8").splitlines() if line[:1] != "#"]
    return {file: float(seconds) for seconds, file in lines}


def git(*words: str) -> str | None:
    """Return what a git command prints of this checkout; None if it fails."""
    command = ["git", "-c", "safe.directory=*", *words]  # the checkout may be somebody else's
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return None if done.returncode else done.stdout
