"""``lightning-rl unpack``: writes a pack's run directory, and makes its update again."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lightning_rl.cli.pack.base import Base
    from lightning_rl.cli.rerun.run import RecordedRun


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "unpack",
        "Check a pack, write its run directory, and make its update again.",
        "Exit status: 0 if the update is equal, to the bit or to rounding, or if a smaller pack "
        "was written, else 1.",
    )
    parser.add_argument("file", type=Path, help="a file that lightning-rl pack wrote")
    parser.add_argument("--run", action="store_true", help="make the update again, and compare it")
    small = (
        "make the update again, and write a pack of the fewest rollouts and layers that show the "
    )
    small += "same NaN, exploding gradient or difference to this file"
    parser.add_argument("--shrink", metavar="FILE", type=Path, help=small)
    out = "the run directory to write, which must not exist (default: the file's name without .zip)"
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    base = "the model of --base, if the pack was written with one: a directory or "
    base += "owner/name@revision of the hub"
    parser.add_argument("--base", metavar="MODEL", help=base)
    trust = "also build the run from this module's code (default: from this library's only)"
    parser.add_argument("--trust", metavar="MODULE", action="append", default=[], help=trust)
    parser.set_defaults(trusted_only=True)
    parsed = parser.parse_args(arguments)
    parsed.out = parsed.out or parsed.file.with_suffix("")
    if parsed.shrink is not None and parsed.shrink.resolve() == parsed.file.resolve():
        raise ConfigError(f"--shrink {parsed.shrink} is the pack itself; choose another file")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Unpack, make the update again if requested, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.pack.archive import extract_archive
    from lightning_rl.cli.pack.base import Base
    from lightning_rl.cli.pack.run_directory import as_one_process, make_run
    from lightning_rl.cli.rerun.run import RecordedRun
    from lightning_rl.run.known_warnings import without_info

    with tempfile.TemporaryDirectory(prefix="lightning_rl_unpack_") as scratch:
        parts, run = Path(scratch, "parts"), options.out
        if rank_zero_only.rank > 0:  # type: ignore[attr-defined]
            run = Path(scratch, "run")  # the others only help to train
        if run.exists() or run.is_symlink():
            raise ConfigError(f"--out {run} exists; choose a directory that does not")
        about = extract_archive(options.file, parts)
        base = Base(options.base)
        base.put_back(parts, about)
        if options.shrink is not None and about["processes"] > 1:
            _say(f"one process trains on the rollouts of all {about['processes']}")
            about = as_one_process(about, parts)
        make_run(about, parts, run)
        _say(f"wrote the run directory {run}, for iteration {about['iteration']}")
        if not options.run and options.shrink is None:
            return 0
        if options.trust:  # what was packed with --with-code
            sys.path.append(str((run / "code").resolve()))
        with without_info():
            recorded = RecordedRun(run, CommandParser.trust_in(options))
            return _make_again(about, parts, base, recorded, options)


def _say(*lines: str) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.process import printable

    for line in lines:
        rank_zero_only(print)(printable(line).replace("\n", " "), flush=True)


def _make_again(
    about: dict[str, Any],
    parts: Path,
    base: "Base",
    run: "RecordedRun",
    options: argparse.Namespace,
) -> int:
    """Make the update again, and shrink the pack if requested; return the exit status."""
    from lightning_rl.cli.pack.observation import Observation, made_again, verdict
    from lightning_rl.cli.pack.symptoms import Difference, own_symptom
    from lightning_rl.cli.pack.trees import read_tree

    packed = Observation.of(read_tree(parts / "expected"))
    update = made_again(run, about["iteration"])
    here, there = update.rerun.environment, about["environment"]
    elsewhere = [
        f"packed with {name} {was}, here {here.get(name)}"
        for name, was in there.items()
        if here.get(name) != was
    ]
    symptom = own_symptom(update, about["median_grad_norm"])
    shown = [] if symptom is None else [f"symptom: {symptom.text}"]
    said, same = verdict(packed, update.seen, update.rerun, update.observer.rows)
    _say(*elsewhere, *update.rerun.lines()[:-1], *shown, said)
    if options.shrink is None:
        return 0 if same else 1
    from lightning_rl.cli.pack.shrinking import Shrinking

    try:
        symptom = symptom or Difference(packed, update)
    except DataError as error:
        _say(str(error))
        return 1
    Shrinking(about, parts, base, run.options, update, symptom, _say).write(options.shrink)
    sizes = [file.stat().st_size for file in (options.file, options.shrink)]
    _say(f"wrote {options.shrink}, {sizes[1]:,} bytes of {sizes[0]:,}")
    return 0
