"""Compares the contents of a run directory with its ledger."""

from collections.abc import Iterator

from lightning_rl.callbacks.rerun_recorder import name_in
from lightning_rl.cli.audit.claims import Claims
from lightning_rl.cli.audit.records import Records
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.ledger import Entry, Ledger, digest_of_file, digest_of_json
from lightning_rl.data.rollouts.parquet import ParquetRollouts
from lightning_rl.data.rollouts.seals import folders_in, result_files, seal_of
from lightning_rl.errors import DataError
from lightning_rl.run.files.checkpoint_io import damage, written_digest


def examine(run: RecordedRun, head: str | None = None) -> Records:
    """Check the ledger's hash chain, and every file of which it has a digest.

    Args:
        run: the recorded run.
        head: a hash that was noted while the run was trusted; the chain must contain it.

    Raises:
        DataError: if the run has no ledger, its chain is broken, or does not contain ``head``.
    """
    ledger = Ledger(run.path)
    if not ledger.path.exists():
        raise DataError(
            f"{run.path} has no {ledger.path.name}, which RerunRecorder writes; "
            "`lightning-rl rerun --iteration K` works without one"
        )
    entries = ledger.entries()
    if head is not None and not any(entry["hash"].startswith(head) for entry in entries):
        raise DataError(
            f"{ledger.path} does not contain --head {head}: either all of it was rewritten, or it "
            "belongs to another run"
        )
    records = Records.of(entries)
    if not records.begins:
        raise DataError(f"{ledger.path} holds no start of a run; train first")
    records.changed += _changed_links(entries)
    for name, digest in records.begins[-1]["configuration"].items():
        records.changed += _changed_file(run, name, digest, "the run was started with")
    records.changed += [
        *_changed_outcomes(run, records),
        *_changed_rollouts(run, records),
        *_changed_results(run, records),
    ]
    _look_at_checkpoints(run, records)
    if records.sealed:
        _look_for_more(run, records)
    if not records.changed:  # else the files contradict each other for a reason that was named
        records.changed += Claims(run, records).contradictions()
    return records


def _changed_links(entries: list[Entry]) -> Iterator[str]:
    """Yield the places where the weights differ from those that the entry before recorded."""
    left: dict[int, str] = {}
    for entry in entries:
        if entry["kind"] == "begin":
            version, weights = entry["version"], entry["weights"]
            if left.get(version, weights) != weights:
                yield (
                    f"the run resumed from version {version} with other weights than iteration "
                    f"{version} ended with: its checkpoint was changed, or belongs to another run"
                )
            left[version] = weights
        elif entry["kind"] == "iteration":
            version = entry["version"]
            if left.get(version - 1) != entry["weights_before"]:
                yield f"iteration {version} began with other weights than version {version - 1}"
            left[version] = entry["weights_after"]


def _changed_rollouts(run: RecordedRun, records: Records) -> Iterator[str]:
    for version, entry in records.iterations.items():
        for name, digest in entry["rollouts"].items():
            found = list(_changed_file(run, name, digest, f"iteration {version} was trained on"))
            yield from found or _contradictions(run, name)


def _contradictions(run: RecordedRun, name: str) -> Iterator[str]:
    """Yield contradictions within a file that matches the ledger: both were rewritten."""
    try:
        for what in ParquetRollouts(run.path / name).contradictions():
            yield f"{name}: {what}"
    except DataError as error:
        yield str(error)


def _changed_results(run: RecordedRun, records: Records) -> Iterator[str]:
    for name, seal in records.files.items():
        file = run.path / name
        if not file.is_file():
            yield f"{name}, which the run wrote, is missing"
        elif seal_of(file, seal["bytes"]) != seal:
            yield f"{name} is not what the run wrote"
        elif (more := file.stat().st_size - seal["bytes"]) and records.end is not None:
            yield f"{name} has {more} bytes more than the run wrote"


def _changed_file(run: RecordedRun, name: str, digest: str, use: str) -> Iterator[str]:
    file = run.path / name
    if not file.is_file():
        yield f"{name}, which {use}, is missing"
    elif digest_of_file(file) != digest:
        yield f"{name} is not what {use}"


def _changed_outcomes(run: RecordedRun, records: Records) -> Iterator[str]:
    """Yield changed checksums and metrics, which reruns are compared with."""
    lines = list(run.log.lines())
    weights = {(line.version, digest_of_json(line.weights)) for line in lines}
    metrics = {(line.version, digest_of_json(line.metrics)) for line in lines}
    for version, entry in records.iterations.items():
        if (version, entry["weights_after"]) not in weights:
            yield f"the recorded checksums of version {version} were changed or removed"
    for version, digest in records.metrics:
        if (version, digest) not in metrics:
            yield f"the recorded metrics of iteration {version} were changed or removed"


def _look_at_checkpoints(run: RecordedRun, records: Records) -> None:
    found = [file for file in run.path.rglob("*.ckpt") if not file.is_symlink()]  # last.ckpt
    files = {name_in(run.path, file): file for file in found}
    for name in records.checkpoints:
        elsewhere = run.path / name  # an absolute name stays itself
        if name not in files and elsewhere.is_file():
            files[name] = elsewhere
    for name, file in sorted(files.items()):
        digest = records.checkpoints.get(name)
        if file.is_dir():
            records.unknown.append(name)
        elif digest is None:
            _added(records, name, "a checkpoint")
        elif written_digest(file) != digest:
            records.changed.append(f"{name} is not the checkpoint that the run saved")
        elif (what := damage(file)) is not None:
            records.changed.append(f"{name} was changed: {what}")
    for name, digest in records.checkpoints.items():
        # Of earlier releases' ledgers it may be one that keep_last removed.
        if digest is not None and name not in files and records.sealed:
            (records.unknown if records.end is None else records.changed).append(
                f"{name}, which the run saved, is missing"
            )
    for link in run.path.rglob("*.ckpt"):
        if link.is_symlink() and name_in(run.path, link) not in files:  # last.ckpt
            records.changed.append(
                f"{link.relative_to(run.path)} points to {name_in(run.path, link)}, which is not a "
                "checkpoint of the run"
            )


def _look_for_more(run: RecordedRun, records: Records) -> None:
    """Report files that the ledger does not mention."""
    results, folders = result_files(run.path), set(folders_in(run.path))
    for name in results.keys() - records.files.keys():
        _added(records, name, "a file")
    if records.end is not None:
        for name in sorted(folders - set(records.end["folders"])):
            records.changed.append(f"{name}/ was added after the end of the run")
    for path in run.log.others():
        _added(records, f"{run.log.path.name}/{path.name}", "a file")
    last = max(records.iterations, default=records.begins[-1]["version"])
    versions = run.log.iterations() | {line.version for line in run.log.lines()}
    later = {version for version in versions if version > last}
    # A run that was killed has begun one iteration more than its ledger tells of.
    if later - ({last + 1} if records.end is None else set()):
        records.changed.append(
            f"{run.log.path.name}/ extends to iteration {max(later)}, but the ledger ends with "
            f"{last}: its last lines were removed, or iterations were added"
        )
    if records.end is None and "summary.json" in results.keys() - records.sealed:
        records.changed.append(
            "summary.json records an end of the run, but the ledger does not: its last lines were "
            "removed"
        )


def _added(records: Records, name: str, what: str) -> None:
    """Record a file that is not in the ledger; after the end of a run, that is a change."""
    if records.end is None:
        records.unknown.append(name)
    else:
        records.changed.append(f"{name}, {what}, was added after the end of the run")
