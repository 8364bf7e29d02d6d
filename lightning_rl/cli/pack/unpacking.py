"""``lightning-rl unpack``: writes a pack's run directory, and makes its update again."""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import ConfigError, DataError


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
    model = "the model's directory, if the pack was written with --lora-only"
    parser.add_argument("--model", metavar="DIR", type=Path, help=model)
    trust = "also build the run from this module's code (default: from this library's only)"
    parser.add_argument("--trust", metavar="MODULE", action="append", default=[], help=trust)
    parsed = parser.parse_args(arguments)
    parsed.out = parsed.out or parsed.file.with_suffix("")
    if parsed.shrink is not None and parsed.shrink.resolve() == parsed.file.resolve():
        raise ConfigError(f"--shrink {parsed.shrink} is the pack itself; choose another file")
    if parsed.out.exists() or parsed.out.is_symlink():
        raise ConfigError(f"--out {parsed.out} exists; choose a directory that does not")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Unpack, make the update again if requested, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning_rl.cli.pack.archive import extract_archive
    from lightning_rl.cli.pack.run_directory import make_run
    from lightning_rl.run.known_warnings import without_info

    with tempfile.TemporaryDirectory(prefix="lightning_rl_unpack_") as scratch:
        parts = Path(scratch)
        about = extract_archive(options.file, parts)
        models = models_of(about, parts, options.model)
        make_run(about, parts, options.out, models)
        _say(f"wrote the run directory {options.out}, for iteration {about['iteration']}")
        if not options.run and options.shrink is None:
            return 0
        if options.trust:  # what was packed with --with-code
            sys.path.append(str((options.out / "code").resolve()))
        with without_info():
            return _make_again(about, parts, models, options)


def _say(*lines: str) -> None:
    from lightning_rl.cli.process import printable

    for line in lines:
        print(printable(line).replace("\n", " "), flush=True)


def _make_again(
    about: dict[str, Any], parts: Path, models: dict[str, Path], options: argparse.Namespace
) -> int:
    """Make the update again, and shrink the pack if requested; return the exit status."""
    from lightning_rl.cli.pack.observation import Observation, made_again, verdict
    from lightning_rl.cli.pack.symptoms import Difference, own_symptom
    from lightning_rl.cli.pack.trees import read_tree
    from lightning_rl.cli.rerun.run import RecordedRun

    packed = Observation.of(read_tree(parts / "expected"))
    trust = ["--trusted_only", *(f"--trust={module}" for module in options.trust)]
    update = made_again(RecordedRun(options.out, trust), about["iteration"])
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
    Shrinking(about, parts, models, trust, update, symptom, _say).write(options.shrink)
    sizes = [file.stat().st_size for file in (options.file, options.shrink)]
    _say(f"wrote {options.shrink}, {sizes[1]:,} bytes of {sizes[0]:,}")
    return 0


def models_of(about: Mapping[str, Any], parts: Path, base: Path | None) -> dict[str, Path]:
    """Return the directories of models that are used in place of the pack's own.

    Args:
        about: what ``pack.json`` says.
        parts: the pack's members.
        base: the directory of the model whose weights were left out; None: the pack's are whole.

    Raises:
        DataError: if such a directory is needed, not needed, or of another model.
    """
    from lightning_rl.cli.pack.configuration import weight_digests
    from lightning_rl.data.rollouts.log import first_difference

    bases: dict[str, Any] = about["bases"]
    if base is None and bases:
        raise DataError(
            f"the pack was written with --lora-only, without the weights of {', '.join(bases)}; "
            "name the model's directory with --model"
        )
    if base is not None and not bases:
        raise DataError(f"--model {base}: the pack has all weights; leave it out")
    for place, digests in bases.items():
        assert base is not None
        name = first_difference(digests, weight_digests(base))
        if name is not None:
            raise DataError(
                f"--model {base} is not the model that was packed: {name} differs; use the one "
                f"from which {place} was made"
            )
    return {place: base for place in bases if base is not None}
