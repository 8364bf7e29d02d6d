"""The runs of a comparison: each a command of its own, and a line in a file once it has ended."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_rl.cli.children import last_words, start_command
from lightning_rl.cli.compare.configurations import Contender, record
from lightning_rl.cli.process import duration
from lightning_rl.config.yaml_text import dump_yaml
from lightning_rl.data.rollouts.jsonl import parsed, whole_lines
from lightning_rl.errors import ConfigError, RunInterrupted
from lightning_rl.run.files.rundir import append, write_whole
from lightning_rl.run.files.strict_json import dumps
from lightning_rl.run.processes.child import ending

_BAD_CONFIGURATION = 2


class RunFailed(RunInterrupted):
    """A run of a comparison failed; the message has its error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=1)


class BudgetSpent(RunFailed):
    """The budget ended in the middle of a run, which is lost."""


class Runs:
    """Trains configurations, each run in its own directory ``FOLDER/NAME/seed_N``.

    A line of ``runs.jsonl`` says that a run has ended, and in how many seconds. What a killed
    comparison left of a run without such a line is deleted, and the run begins anew.

    Args:
        folder: of the comparison.
        contenders: the configurations.

    Raises:
        ConfigError: if the folder holds something else, or runs of other configurations.
        DataError: if ``runs.jsonl`` is damaged.
    """

    NAME = "runs.jsonl"

    def __init__(self, folder: Path, contenders: Sequence[Contender]) -> None:
        self.folder = folder
        self._contenders = {contender.name: contender for contender in contenders}
        self._file = folder / self.NAME
        others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if others and not self._file.exists():
            raise ConfigError(
                f"--out {folder} holds {others[0]}, but no comparison; choose another folder"
            )
        if not others:
            write_whole(self._file, "")
        record(folder, contenders)
        rows = [parsed(f"{self._file}:{n}", line) for n, line in whole_lines(self._file)]
        self.seconds: dict[tuple[str, int], float] = {
            (row["configuration"], row["seed"]): row["seconds"] for row in rows
        }
        """The seconds of each run that has ended, by configuration and seed."""

    def directory(self, name: str, seed: int) -> Path:
        """Return a run's directory."""
        return self.folder / name / f"seed_{seed}"

    def train(self, name: str, seed: int, deadline: float) -> None:
        """Train a configuration with a seed.

        Args:
            name: of the configuration.
            seed: for ``seed_everything``.
            deadline: time of ``time.monotonic`` at which the run is killed.

        Raises:
            ConfigError: if ``fit`` refuses the configuration.
            BudgetSpent: if the deadline comes first.
            RunFailed: if the run fails.
        """
        shutil.rmtree(self.directory(name, seed), ignore_errors=True)
        begin = time.monotonic()
        child = start_command("fit", *self._arguments(name, seed))
        try:
            in_time = child.ended_within(deadline - begin)
            status, said = child.status, last_words(child)
        finally:
            child.kill()
        seconds, run = time.monotonic() - begin, f"{name} with seed {seed}"
        if not in_time or status is None:
            raise BudgetSpent(
                f"the budget was spent {duration(seconds)} after the start of {run}, which is lost"
            )
        if status == _BAD_CONFIGURATION:
            raise ConfigError(f"{run}{said}")
        if status:
            raise RunFailed(f"{run} {ending(status)}{said} (the same command continues)")
        self.seconds[name, seed] = seconds
        row = {"configuration": name, "seed": seed, "seconds": round(seconds, 3)}
        append(self._file, dumps(row) + "\n")

    def _arguments(self, name: str, seed: int) -> list[str]:
        directory = self.directory(name, seed)
        logger = {
            "class_path": "CSVLogger",
            "init_args": {"save_dir": str(directory.parent), "name": "", "version": directory.name},
        }
        return [
            f"--config={self.folder / f'{name}.yaml'}",
            f"--seed_everything={seed}",
            f"--trainer.logger={dump_yaml(logger)}",
            f"--trainer.default_root_dir={directory}",
            *self._contenders[name].options,
        ]
