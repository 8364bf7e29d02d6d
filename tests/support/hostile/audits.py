"""Provide hostile calls: what is done to a recorded run before it is audited or rerun."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.data.rollouts.ledger import Ledger
from tests.support.bad_configs import make_model
from tests.support.hostile.call import Call, command
from tests.support.hostile.forged_runs import chain_anew, rechained_ledger
from tests.support.recorded_run import make_place, stand_in, train

GENEROUS = 300.0


def recorded(folder: Path) -> Path:
    """Return a run of four iterations that ended well."""
    make_model(folder / "model")
    make_place(folder)
    return train(folder, folder / "model", "--trainer.callbacks+=PreviewTable")


def audited(name: str, change: Callable[[Path], object], *says: str, right: bool = False,
            begin: tuple[str, ...] = ("audit", "--share", "0")) -> Call:  # fmt: skip
    """Audit a run after this was done to it."""

    def play(folder: Path) -> None:
        run = recorded(folder)
        head = Ledger(run).head
        change(run)
        noted = ("--head", head) if change is rechained_ledger else ()
        with pytest.MonkeyPatch.context() as patch:
            stand_in(folder, patch)
            command(begin[0], str(run), *begin[1:], *noted)(folder)

    return Call(name, play, says, right, GENEROUS)


def entry(name: str, says: str, kind: str = "iteration", **change: Any) -> Call:
    """Write a ledger with other values in its entries of a kind, and every hash right."""

    def changed(run: Path) -> None:
        chain_anew(run, lambda one: one.update(change) if one["kind"] == kind else None)

    return audited(f"ledger: {name}", changed, says)


def written(name: str, file: str, content: bytes, *says: str, **options: Any) -> Call:
    return audited(name, lambda run: (run / file).write_bytes(content), *says, **options)


def line(text: str) -> Callable[[Path], object]:
    """Add one more line to the ledger."""

    def add(run: Path) -> None:
        with (run / "ledger.jsonl").open("a") as file:
            file.write(text + "\n")

    return add


def _of_no_kind(one: dict[str, Any]) -> None:
    if one["kind"] == "iteration":
        one["kind"] = "x"


def _without_head(run: Path) -> None:
    """Remove the head, so that the first entry is an iteration."""
    entries = [one for one in Ledger(run).entries() if one["kind"] != "begin"]
    (run / "ledger.jsonl").unlink()
    ledger = Ledger(run)
    for one in entries:
        content = {k: v for k, v in one.items() if k not in ("kind", "previous", "hash")}
        ledger.append(one["kind"], **content)


def _escaped_name(run: Path) -> None:
    change = {"rollouts": {"\x1b[2J/\ud800": "0" * 64}}
    chain_anew(run, lambda one: one.update(change) if one["kind"] == "iteration" else None)


def _into_nowhere(run: Path) -> None:
    link = run / "checkpoints" / "last.ckpt"
    link.unlink(missing_ok=True)
    link.symlink_to("/dev/zero")


CALLS = [
    audited("nothing", lambda run: None, "nothing was changed", right=True),
    audited("nothing, and all is done again", lambda run: None, "nothing was changed", right=True,
            begin=("audit", "--share", "1", "--rollouts", "0")),
    audited("ledger: a kind that is none", lambda run: chain_anew(run, _of_no_kind), "of kind 'x'"),
    entry("a version that is text", "version of 'iteration' is '1'", version="1"),
    entry("no version", "version of 'iteration' is None", version=None),
    entry("rollouts that are a list", "rollouts of 'iteration' is []", rollouts=[]),
    entry("rollouts without digests", "rollouts of 'iteration' are not digests", rollouts={"a": 3}),
    entry("a configuration that is text", "configuration of 'begin' is 'x'", "begin",
          configuration="x"),
    entry("an environment that is none", "environment of 'begin' is None", "begin",
          environment=None),
    entry("a checkpoint that is a number", "file of 'checkpoint' is 3", "checkpoint", file=3),
    entry("seals that are text", "files of 'iteration' are not digests", files="x"),
    entry("folders that are a number", "folders of 'end' is 3", "end", folders=3),
    entry("a file out of the run", "is not what iteration", rollouts={"/etc/hostname": "0" * 64}),
    entry("a file that never ends", "is missing", rollouts={"/dev/zero": "0" * 64}),
    audited("ledger: the first entry is no start", _without_head, "a ledger starts with 'begin'"),
    audited("ledger: names with escapes", _escaped_name, "CHANGED: ␛[2J/"),
    audited("ledger: a line that is a number", line("3"), "is not an entry"),
    audited("ledger: nested 100,000 deep", line("[" * 100_000), "is not an entry"),
    audited("ledger: bytes that are no text", lambda run: (run / "ledger.jsonl").write_bytes(
        b"\xff\xfe\n"), "ledger.jsonl:1 is not an entry"),
    written("ledger: empty", "ledger.jsonl", b"", "holds no start of a run"),
    audited("last.ckpt leads to a device", _into_nowhere, "last.ckpt points to"),
    written("config.yaml: a list", "config.yaml", b"[3]", "config.yaml is not what the run was"),
    written("config.yaml: no YAML", "config.yaml", b"{", "config.yaml is not a run's configuration",
            begin=("audit", "--share", "1")),
    written("versions.jsonl: numbers", "rerun/versions.jsonl", b"3\n[]\n{}\n",
            "the recorded checksums of version 1 were changed or removed"),
    written("versions.jsonl: a version that is a list", "rerun/versions.jsonl",
            json.dumps({"version": [], "weights": {}}).encode() + b"\n", "changed or removed"),
    written("a file with a name like an iteration's", "rerun/iteration-x.parquet", b"",
            "rerun/iteration-x.parquet, a file, was added"),
    written("rollouts that are cut", "rerun/iteration-000002-000.parquet", b"PAR1",
            "is not what iteration 2 was trained on"),
    written("an audit's page of before", "view.html", b"", "nothing was changed", right=True),
]  # fmt: skip
