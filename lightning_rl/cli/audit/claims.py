"""Compares what the files of a run say with what they were made from.

Whoever changes a result can write the ledger anew, so that all digests agree. But the results
repeat, or sum up, what other files hold: ``summary.json`` the rows of ``metrics.jsonl``, those the
outcomes in the rerun log, and these the rollouts, which are generated and trained on again.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_rl.callbacks.report import PACKAGES, figures
from lightning_rl.cli.audit.records import Records
from lightning_rl.cli.rerun.run import RecordedRun, config_in
from lightning_rl.collect.pipeline import in_groups
from lightning_rl.collect.stats import rollout_metrics, set_metrics
from lightning_rl.data.rollouts.files import RUN_FILES, Record, as_json, as_record
from lightning_rl.data.rollouts.ledger import digest_of_json
from lightning_rl.rollout import Rollout
from lightning_rl.run.files.metrics import MetricsLog, read_rows
from lightning_rl.run.files.strict_json import dumps

SUMMARY = "summary.json"
OWN = ("iteration", "wall_s", "cpu_s")
"""The columns that ``RunReport`` adds to the metrics of a row."""


def contradiction(claimed: Any, real: Any, source: str, field: str = "") -> str | None:
    """Return in words the first field that differs; None if all that is real is claimed."""
    if isinstance(real, Mapping) and isinstance(claimed, Mapping):
        pairs = [(f"{field}.{name}", claimed.get(name), real[name]) for name in real]
    elif isinstance(real, list) and isinstance(claimed, list) and len(real) == len(claimed):
        pairs = [(f"{field}.{i}", *pair) for i, pair in enumerate(zip(claimed, real, strict=True))]
    elif same(claimed, real):
        return None
    else:
        return f"{field.lstrip('.')} is {claimed!r:.80}, but {source} {real!r:.80}"
    contradictions = (contradiction(said, true, source, name) for name, said, true in pairs)
    return next(filter(None, contradictions), None)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, two numbers but for the rounding of a sum."""
    if isinstance(one, float) and isinstance(other, int | float):
        nan = math.isnan(one) and math.isnan(other)
        return nan or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return bool(one == other)


@dataclass(frozen=True)
class Claims:
    """The results of a run whose files all have the digests that the ledger holds."""

    run: RecordedRun
    records: Records
    _data: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Recorded data modules, by the version since which they hold."""

    def contradictions(self) -> Iterator[str]:
        """Yield every contradiction, with the file, its line and the field."""
        found = list(self._in_metrics())
        yield from found
        yield from self._in_csv()
        yield from self._in_outcomes()
        for name in RUN_FILES:
            yield from self._in_rollouts(name)
        if not found:  # else the summary is right, or of what was named already
            yield from self._in_summary()

    @cached_property
    def _starts(self) -> list[int]:
        """The versions that the run was started from; another one may have been here before."""
        begins = self.records.begins
        return [one["version"] for one in begins if one.get("run") == begins[-1].get("run")]

    @cached_property
    def _last(self) -> int:
        return max(self.records.iterations, default=self._starts[-1])

    @cached_property
    def _summary(self) -> dict[str, Any]:
        if SUMMARY not in self.records.files:
            return {}
        try:
            summary = json.loads((self.run.path / SUMMARY).read_bytes())
        except (ValueError, RecursionError):
            summary = None
        return summary if isinstance(summary, dict) else {"status": "completed"}

    def _unfinished(self, iteration: int) -> bool:
        """Return True for the iteration at which a run was killed or failed, or just before it."""
        ended = self._summary.get("status") == "completed"
        return not ended and iteration in (self._last, self._last + 1)

    @cached_property
    def _recorded(self) -> dict[int, dict[str, list[float]]]:
        """The values of each metric of each version, as the ledger has them."""
        recorded: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        known = set(self.records.metrics)
        for line in self.run.log.lines():
            if (line.version, digest_of_json(line.metrics)) in known:
                for name, value in line.metrics.items():
                    recorded[line.version][name].append(value)
        return {version: dict(values) for version, values in recorded.items()}

    @cached_property
    def _rows(self) -> dict[int, list[tuple[str, Record]]]:
        """The lines of ``metrics.jsonl`` by iteration."""
        rows: defaultdict[int, list[tuple[str, Record]]] = defaultdict(list)
        for where, row in self._lines(MetricsLog.NAME):
            if all(value is None or isinstance(value, int | float) for value in row.values()):
                rows[row["iteration"]].append((where, row))
        return dict(rows)

    def _lines(self, name: str) -> Iterator[tuple[str, Record]]:
        """Yield the objects of a file, as far as it is sealed, that are of the present run.

        A run appends to the file of one that was here before, whose iterations it begins anew.
        """
        seal = self.records.files.get(name)
        if seal is None:
            return
        file, begin, before = self.run.path / name, 0, 0
        for number, row in _objects(file, seal["bytes"]):
            begin, before = number if row["iteration"] < before else begin, row["iteration"]
        for number, row in _objects(file, seal["bytes"]):
            if number >= begin:
                yield f"{name}:{number}", row

    def _in_metrics(self) -> Iterator[str]:
        """Compare each row with the outcome of its iteration, except its times."""
        if MetricsLog.NAME not in self.records.files:
            return
        first = self._starts[0]
        for iteration, lines in self._rows.items():
            known = self._recorded.get(iteration)
            # What a row was before the start at its iteration is not recorded.
            partly = iteration == first > 0 or (iteration == 0 and self._starts.count(0) > 1)
            if iteration < first or (known is None and (partly or self._unfinished(iteration))):
                continue
            for where, row in lines[-1:] if partly else lines:
                if known is None:
                    yield f"{where} is a row of iteration {iteration}, which was not recorded"
                    continue
                claimed = {n: v for n, v in row.items() if n not in OWN}
                claimed = {n: v for n, v in claimed.items() if n in known or not partly}
                yield from _not_among(where, claimed, known)
            for name in known.keys() - lines[-1][1].keys() if known and not partly else ():
                yield f"{lines[-1][0]}: {name} of iteration {iteration} is missing"
        for iteration in self._recorded.keys() - self._rows.keys():
            if not self._unfinished(iteration):
                yield f"{MetricsLog.NAME} has no row of iteration {iteration}"

    def _in_csv(self) -> Iterator[str]:
        """Compare the table of a ``CSVLogger``, which has metrics of Lightning's as well."""
        name = "metrics.csv"
        if name not in self.records.files:
            return
        with (self.run.path / name).open(encoding="utf-8", errors="replace", newline="") as file:
            try:
                for number, row in enumerate(csv.DictReader(file), 2):
                    known = self._recorded.get(int(row.get("step") or -1), {})
                    numbers = {n: float(row[n]) for n in known if row.get(n)}
                    cells = {n: v if math.isfinite(v) else None for n, v in numbers.items()}
                    yield from _not_among(f"{name}:{number}", cells, known)
            except (csv.Error, ValueError, TypeError) as error:
                yield f"{name} is not what a run writes: {error}"

    def _in_outcomes(self) -> Iterator[str]:
        """Compare the metrics of rollouts with those that were trained on."""
        for version, entry in self.records.iterations.items():
            if not entry["rollouts"] or not _trains_on_all(self._data_at(version - 1)):
                continue
            rollouts = self._trained_on(version)
            real = _metrics_of(rollouts, version - 1)
            claimed = {n: v[-1] for n, v in self._recorded.get(version, {}).items()}
            if contradicted := contradiction(claimed, real, "its rollouts give"):
                yield f"the recorded metrics of iteration {version}: {contradicted}"

    def _data_at(self, version: int) -> dict[str, Any]:
        """Return the recorded data module of a version: its class and its arguments."""
        since, file = self.run.config_of(version)
        if since not in self._data:
            data = config_in(file).get("data")
            self._data[since] = data if isinstance(data, dict) else {}
        return self._data[since]

    def _trained_on(self, version: int) -> list[Rollout]:
        ranks = range(len(self.run.log.files_of(version)))
        return [rollout for rank in ranks for rollout in self.run.log.rollouts(version, rank)]

    def _in_rollouts(self, name: str) -> Iterator[str]:
        """Compare the rollouts that people read with those that were trained on."""
        held = self.run.log.iterations()
        for iteration, lines in groupby(self._lines(name), lambda line: line[1]["iteration"]):
            if iteration not in held:
                # Copied, of an iteration that did not end, or of a run that kept no rollouts.
                known = iteration <= self._starts[0] or self._unfinished(iteration) or not held
                if not known and self._last > self._starts[-1]:
                    where, _ = next(lines)
                    yield f"{where} is of iteration {iteration}, which was not trained on"
                continue
            trained = {rollout.id: rollout for rollout in self._trained_on(iteration)}
            given = self._data_at(iteration - 1).get("init_args") or {}
            for where, row in lines:
                rollout = trained.get(str(row.get("id")))
                if rollout is None:
                    if not given.get("buffer"):  # which exchanges them
                        yield f"{where}: id is {row.get('id')!r:.80}, which was not trained on"
                    continue
                real = json.loads(as_json(as_record(rollout)))
                if contradicted := contradiction(
                    row, real, f"iteration {iteration} was trained on"
                ):
                    yield f"{where}: {contradicted}"

    def _in_summary(self) -> Iterator[str]:
        """Compare the figures that sum up the rows, and what the ledger knows as well."""
        claimed = self._summary
        missing = self._recorded.keys() - self._rows.keys()
        if not claimed or missing:  # a full disk refused the last row
            return
        iterations = claimed.get("iterations")
        last = (
            iterations
            if isinstance(iterations, int) and self._unfinished(iterations)
            else self._last
        )
        text = "\n".join(json.dumps(row) for rows in self._rows.values() for _, row in rows)
        rows, environment = read_rows(text), self.records.begins[-1]["environment"]
        versions = {name: environment[name] for name in PACKAGES if name in environment}
        real = figures(rows, last) | {"versions": versions, "metrics": rows[-1] if rows else {}}
        real = json.loads(dumps(real))
        if contradicted := contradiction(claimed, real, "the other files say"):
            yield f"{SUMMARY}: {contradicted}"
        if (claimed.get("status") == "completed") != (claimed.get("error") is None):
            status, error = claimed.get("status"), claimed.get("error")
            yield f"{SUMMARY}: status is {status!r:.80}, but error is {error!r:.80}"


def _objects(file: Path, size: int) -> Iterator[tuple[int, Record]]:
    """Yield the numbered lines that hold an object of an iteration; readers skip all others."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            size -= len(line)
            if size < 0:
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("iteration")) is int:
                yield number, row


def _not_among(
    where: str, claimed: Mapping[str, float | None], known: Mapping[str, list[float]]
) -> Iterator[str]:
    """Yield the metrics with a value that was never recorded; JSON has null for NaN and more."""
    for name, value in claimed.items():
        values = known.get(name, [])
        if not any(same(value, one if math.isfinite(one) else None) for one in values):
            recorded = " or ".join(map(repr, values)) or "nothing"
            yield f"{where}: {name} is {value!r:.80}, but {recorded} was recorded"


def _trains_on_all(data: Mapping[str, Any]) -> bool:
    """Return True if iterations train on all that they collect, and on nothing else."""
    given = data.get("init_args") or {}
    collector = (given.get("collector") or {}).get("class_path", "SyncCollector")
    classes = [str(path).rpartition(".")[2] for path in (data.get("class_path"), collector)]
    selection = given.get("selection") or {}
    others = *map(given.get, ("plan", "buffer", "demonstrations")), selection.get("filters")
    return classes == ["RLDataModule", "SyncCollector"] and not any(others)


def _metrics_of(rollouts: list[Rollout], version: int) -> dict[str, float]:
    """Return the metrics that rollouts determine, of those that were collected at a version."""
    counted = [rollout for rollout in rollouts if rollout.trained]
    sets = dict.fromkeys({rollout.prompt.set for rollout in counted} - {""}, 0.0)
    found = rollout_metrics(counted, 1.0, version) | set_metrics(in_groups(counted), sets)
    roles = any(row.role for rollout in counted for row in rollout.rows)
    unknown = ("data/", "rollout/tokens_per_s", *["rollout/staleness"] * roles)
    return {name: value for name, value in found.items() if not name.startswith(unknown)}
