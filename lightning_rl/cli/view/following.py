"""Runs that go on: what is new in them since a page asked last."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from lightning_rl.cli.process import printable
from lightning_rl.cli.view.blocks import blocks_of, plain
from lightning_rl.cli.view.growing import GrowingFile, RereadFile, stamp_of
from lightning_rl.cli.view.page import about, differing
from lightning_rl.cli.view.runs import (
    METRICS,
    SUMMARY,
    Record,
    Run,
    complete,
    find_runs,
    is_rollout_file,
    key_of,
    latest,
    metrics_row,
    name_of,
    newest_config,
    read_about,
    require_inside,
)
from lightning_rl.data.rollouts.files import RUN_FILES, open_rollouts
from lightning_rl.data.rollouts.jsonl import record_of
from lightning_rl.errors import DataError, LightningRLError

QUIET_MINUTES = 5
"""After so long without a row, the page says for how long."""


class FollowedRun:
    """A run directory, or a rollout file, that may still grow.

    What it holds is kept with the revision in which it came: a number that grows whenever anything
    changed in any run. So each page can ask for what is newer than what it has.
    """

    def __init__(self, path: Path, max_rollouts: int) -> None:
        self.run = Run(name_of(path))
        self.problems: list[str] = []
        self._path, self._max = path, max_rollouts
        self._metrics = GrowingFile(path / METRICS, metrics_row)
        self._rollouts: GrowingFile | RereadFile | None = None
        self._rows: dict[float, tuple[int, Record]] = {}
        self._blocks: list[tuple[int, Record]] = []
        self._known: set[tuple[int, str]] = set()
        self._replaced = 0  # the revision in which earlier data lost their validity
        self._stamps: list[tuple[int, int] | None] = []

    def read(self, revision: int) -> bool:
        """Read what is new, for this revision; returns whether anything is."""
        before, self.problems, changed = self.problems, [], False
        in_a_folder = (self._read_about, self._read_metrics)
        own = () if is_rollout_file(self._path) else in_a_folder
        for read in (*own, self._read_rollouts):
            try:
                changed |= read(revision)
            except (LightningRLError, OSError) as error:
                self.problems.append(str(error))
        files = (self._metrics, self._rollouts)
        self.problems += [file.problem for file in files if file and file.problem]
        return changed or self.problems != before

    def since(self, cursor: int, keys: Sequence[str]) -> Record:
        """Return what came after revision ``cursor``, with the settings of ``keys``."""
        whole = self._replaced > cursor
        after = 0 if whole else cursor
        return about(self.run, keys) | {
            "replaced": whole,
            "metrics": [row for revision, row in self._rows.values() if revision > after],
            "blocks": [block for revision, block in self._blocks if revision > after],
            "kept": len(self._blocks),
        }

    def _read_about(self, revision: int) -> bool:
        stamps = [stamp_of(self._path / SUMMARY), stamp_of(newest_config(self._path))]
        if changed := stamps != self._stamps:
            read_about(self.run, self._path)
            self._stamps = stamps
        before, self.run.state = self.run.state, self._state()
        return changed or self.run.state != before

    def _state(self) -> str:
        ended, grew = stamp_of(self._path / SUMMARY), stamp_of(self._path / METRICS)
        status, error = self.run.summary.get("status"), self.run.summary.get("error")
        if status and ended and (grew is None or ended[0] >= grew[0]):  # else it was resumed
            return f"{status}: {error}" if error else str(status)
        if grew is None:
            return "no row yet"
        minutes = int(time.time() - grew[0] / 1e9) // 60
        return "running" if minutes < QUIET_MINUTES else f"no row for {minutes} minutes"

    def _read_metrics(self, revision: int) -> bool:
        require_inside(self._path, self._metrics.path)
        rewritten, new = self._metrics.read()
        if rewritten:
            self._rows.clear()
            self._replaced = revision
        for row in new:
            _, known = self._rows.get(row["iteration"], (0, {}))
            self._rows[row["iteration"]] = (revision, known | plain(row))
        return rewritten or bool(new)

    def _read_rollouts(self, revision: int) -> bool:
        path = self._rollout_file()
        if path is None:
            return False
        replaced = self._rollouts is None or self._rollouts.path != path
        if replaced:
            lines = path.suffix == ".jsonl"
            self._rollouts = GrowingFile(path, record_of) if lines else RereadFile(path)
        file = self._rollouts
        assert file is not None
        try:
            rewritten, new = file.read(self._max)
            if not rewritten and not self._known.isdisjoint(map(key_of, new)):
                file.restart()  # a resumed run recorded some again: only the later ones count
                rewritten, new = True, file.read(self._max)[1]
            new = latest(new)
            pictures = complete(self.run, new, self._path, open_rollouts(path).pictures)
            blocks = [(revision, block | {"pictures": pictures}) for block in blocks_of(new)]
        except (LightningRLError, OSError):
            self._rollouts = None  # all of it is read again next time
            raise
        if replaced or rewritten:
            self._blocks.clear()
            self._known.clear()
            self._replaced = revision
        self._known |= set(map(key_of, new))
        self._blocks += blocks
        self.run.rollouts_total = file.count
        self._forget_the_oldest()
        return replaced or rewritten or bool(new)

    def _rollout_file(self) -> Path | None:
        if is_rollout_file(self._path):
            return self._path
        for name in RUN_FILES:
            require_inside(self._path, self._path / name)
        files = (self._path / name for name in RUN_FILES)
        return next((file for file in files if file.exists()), None)

    def _forget_the_oldest(self) -> None:
        sizes = [len(block["rollouts"]) for _, block in self._blocks]
        total = sum(sizes)
        while sizes and total - sizes[0] >= self._max:
            total -= sizes.pop(0)
            self._blocks.pop(0)


class Following:
    """The runs of a command line; those that appear in a folder later come after the others."""

    def __init__(self, paths: Sequence[Path], max_rollouts: int) -> None:
        self._paths, self._max = paths, max_rollouts
        self._runs: dict[Path, FollowedRun] = {}
        self._problems: list[str] = []
        self._revision = 0
        self._lock = Lock()

    def since(self, cursor: int) -> Record:
        """Read what is new, and return it with ``cursor``, which the next question should name."""
        with self._lock:
            self._read()
            if cursor == self._revision:
                return {"cursor": cursor}
            keys = differing([followed.run for followed in self._runs.values()])
            return {
                "cursor": self._revision,
                "problems": self._problems,
                "runs": [followed.since(cursor, keys) for followed in self._runs.values()],
            }

    def _read(self) -> None:
        revision, problems, changed = self._revision + 1, [], self._revision == 0
        for given in self._paths:
            try:
                for path in find_runs(given):
                    if path not in self._runs:
                        self._runs[path] = FollowedRun(path, self._max)
                        changed = True
            except (DataError, OSError) as error:
                problems.append(f"waiting: {error}")
        for followed in self._runs.values():
            changed |= followed.read(revision)
            problems += followed.problems
        for problem in problems:
            if problem not in self._problems:
                print(f"lightning-rl: {printable(problem)}", file=sys.stderr)
        if changed or problems != self._problems:
            self._revision, self._problems = revision, problems
