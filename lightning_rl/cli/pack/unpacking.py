"""``lightning-rl unpack``: writes a pack's run directory, and makes its update again."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import CheckpointError, ConfigError, DataError


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "unpack",
        "Check a pack, write its run directory, and make its update again.",
        "Exit status: 0 if the update is equal, to the bit or to rounding, else 1.",
    )
    parser.add_argument("file", type=Path, help="a file that lightning-rl pack wrote")
    parser.add_argument("--run", action="store_true", help="make the update again, and compare it")
    out = "the run directory to write, which must not exist (default: the file's name without .zip)"
    parser.add_argument("--out", metavar="DIR", type=Path, help=out)
    model = "the model's directory, if the pack was written with --lora-only"
    parser.add_argument("--model", metavar="DIR", type=Path, help=model)
    trust = "also build the run from this module's code (default: from this library's only)"
    parser.add_argument("--trust", metavar="MODULE", action="append", default=[], help=trust)
    parsed = parser.parse_args(arguments)
    parsed.out = parsed.out or parsed.file.with_suffix("")
    if parsed.out.exists() or parsed.out.is_symlink():
        raise ConfigError(f"--out {parsed.out} exists; choose a directory that does not")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Unpack, make the update again if requested, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning_rl.cli.pack.archive import extract_archive
    from lightning_rl.cli.process import printable
    from lightning_rl.run.known_warnings import without_info

    with tempfile.TemporaryDirectory(prefix="lightning_rl_unpack_") as scratch:
        parts = Path(scratch)
        about = extract_archive(options.file, parts)
        make_run(about, parts, options.out, models_of(about, parts, options.model))
        print(f"wrote the run directory {options.out}, for iteration {about['iteration']}")
        if not options.run:
            return 0
        if options.trust:  # what was packed with --with-code
            sys.path.append(str((options.out / "code").resolve()))
        with without_info():
            lines, same = _made_again(about, parts, options)
    print(*(printable(line).replace("\n", " ") for line in lines), sep="\n")
    return 0 if same else 1


def _made_again(
    about: dict[str, Any], parts: Path, options: argparse.Namespace
) -> tuple[list[str], bool]:
    """Make the update again; return the result as lines, and whether it is the same."""
    from lightning_rl.cli.pack.observation import Observation, Observer, verdict
    from lightning_rl.cli.pack.trees import read_tree
    from lightning_rl.cli.rerun.compare import rerun_iteration
    from lightning_rl.cli.rerun.run import RecordedRun

    packed = Observation.of(read_tree(parts / "expected"))
    trust = ["--trusted_only", *(f"--trust={module}" for module in options.trust)]
    observer = Observer()
    run = RecordedRun(options.out, trust)
    rerun = rerun_iteration(run, about["iteration"], observers=[observer])
    here, there = rerun.environment, about["environment"]
    elsewhere = [
        f"packed with {name} {was}, here {here.get(name)}"
        for name, was in there.items()
        if here.get(name) != was
    ]
    said, same = verdict(packed, observer.seen, rerun)
    return [*elsewhere, *rerun.lines()[:-1], said], same


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


def make_run(about: Mapping[str, Any], parts: Path, run: Path, models: Mapping[str, Path]) -> None:
    """Write a pack's run directory.

    Args:
        about: what ``pack.json`` says.
        parts: the pack's members.
        run: the directory to write, which must not exist.
        models: directories that are used in place of the pack's own models.

    Raises:
        CheckpointError: if the checkpoint is damaged, or of another iteration.
        ConfigError: if the configuration is damaged.
    """
    from lightning_rl.cli.pack.trees import read_tree
    from lightning_rl.config.yaml_text import dump_yaml, parse_yaml
    from lightning_rl.run.files.checkpoint_io import write_checkpoint

    version = about["iteration"] - 1
    checkpoint = read_tree(parts / "checkpoint") if version > 0 else None
    if checkpoint is not None:
        _require_fitting(checkpoint, version)
    text = (parts / "config.yaml").read_text(encoding="utf-8")
    config = parse_yaml(text, "the pack's config.yaml")
    if not isinstance(config, dict) or config.get("ckpt_path") is not None:
        raise ConfigError(
            "the pack's config.yaml must hold keys, and no ckpt_path; ask for the pack again"
        )
    run.mkdir(parents=True)
    for folder in ("models", "rerun", "code"):
        if (parts / folder).is_dir():
            shutil.copytree(parts / folder, run / folder)
    there = {path.relative_to(run).as_posix(): path for path in run.glob("models/*")} | dict(models)
    config["model"] = _with_paths(config.get("model"), there)
    (run / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    if checkpoint is not None:
        write_checkpoint(checkpoint, run / "checkpoints" / f"iteration_{version}.ckpt")


def _require_fitting(checkpoint: Any, version: int) -> None:
    try:
        found = checkpoint["lightning_rl"]["iteration"]
        lists = [checkpoint[name] for name in ("optimizer_states", "lr_schedulers")]
        if not all(isinstance(one, list) for one in lists):
            raise TypeError("its optimizers and schedules must be lists")
        if not isinstance(checkpoint["state_dict"], dict):
            raise TypeError("its weights must be a mapping")
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the pack's checkpoint is damaged ({error!r}); ask for the pack again"
        ) from error
    if found != version:
        raise CheckpointError(
            f"the pack's checkpoint is of version {found!r:.20}, but the update needs {version}; "
            "ask for the pack again"
        )


def _with_paths(node: Any, models: Mapping[str, Path]) -> Any:
    """Return a configuration in which the pack's models have the paths that they have here."""
    if isinstance(node, dict):
        return {key: _with_paths(value, models) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_paths(item, models) for item in node]
    return str(models[node].absolute()) if isinstance(node, str) and node in models else node
