"""``pytest --rehearse run.yaml``: each configuration is a test, decided by a rehearsal."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, without which the plugin does nothing."""
    group = parser.getgroup("lightning_rl")
    told = "rehearse the YAML files that are named, as lightning-rl rehearse does"
    group.addoption("--rehearse", action="store_true", help=told)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "Configuration | None":
    """Take YAML files that are named on the command line."""
    if not parent.config.getoption("--rehearse") or file_path.suffix not in (".yaml", ".yml"):
        return None
    named = (parent.config.invocation_params.dir / a for a in parent.config.args)
    if file_path.resolve() not in {path.resolve() for path in named}:
        return None
    return Configuration.from_parent(parent, path=file_path)


class Configuration(pytest.File):
    """A configuration that was named."""

    def collect(self) -> Iterator["Rehearsal"]:
        yield Rehearsal.from_parent(self, name="rehearse")


class WouldFail(Exception):
    """The verdict of a rehearsal with status 2."""


class Rehearsal(pytest.Item):
    """Passes unless the run would fail; what it would waste is a warning."""

    def runtest(self) -> None:
        command = [sys.executable, "-m", "lightning_rl", "rehearse", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise WouldFail(done.stdout or done.stderr)
        if done.returncode == 1:
            warnings.warn(done.stdout, stacklevel=1)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"rehearsal of {self.path.name}"
