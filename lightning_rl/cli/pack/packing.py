"""``lightning-rl pack``: writes all that one update of a run needs to a file."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import DataError, require_at_least


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "pack",
        "Write all that makes one update of a recorded run again to a file, and try it.",
        "Exit status: 0 if the update is made again from the pack as it was recorded, else 1.",
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    parser.add_argument(
        "--iteration", metavar="K", type=int, required=True, help="the update to pack"
    )
    out = "the file to write (default: iteration_K.zip)"
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    texts = "hash: replace the texts of prompts and completions by their SHA-256 (default: keep)"
    parser.add_argument("--texts", choices=("keep", "hash"), default="keep", help=texts)
    base = "leave out all weights that are equal in this model, a directory or owner/name@revision "
    base += "of the hub; unpack asks for it"
    parser.add_argument("--base", metavar="MODEL", help=base)
    code = "include the source files of your own classes that the configuration names"
    parser.add_argument("--with-code", action="store_true", help=code)
    parser.add_trust()
    parsed = parser.parse_args(arguments)
    require_at_least(1, iteration=parsed.iteration)
    parsed.out = parsed.out or Path(f"iteration_{parsed.iteration}.zip")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Pack an update, make it again from the pack, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.pack.archive import write_archive
    from lightning_rl.cli.pack.base import Base
    from lightning_rl.cli.process import printable
    from lightning_rl.cli.rerun.run import RecordedRun
    from lightning_rl.run.known_warnings import without_info

    @rank_zero_only  # the others only help to train
    def say(*lines: str) -> None:
        print(*map(printable, lines), sep="\n", flush=True)

    run, base = RecordedRun(options.run, CommandParser.trust_in(options)), Base(options.base)
    with without_info(), tempfile.TemporaryDirectory(prefix="lightning_rl_pack_") as scratch:
        parts = Path(scratch, "parts")
        parts.mkdir()
        about = _write_parts(run, options, parts)
        if left_out := base.leave_out(parts):
            count = sum(map(len, left_out.values()))
            about["left_out"].append(f"{count} tensors, which unpack takes from --base")
        about["bases"] = left_out
        say(*_sizes(parts), *(f"left out: {what}" for what in about["left_out"]))
        base.put_back(parts, about)  # as whoever unpacks it does
        equal = _try(about, parts, Path(scratch, "run"), run.options, say)
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            base.leave_out(parts)
            write_archive(parts, options.out)
            say(f"wrote {options.out}, {options.out.stat().st_size:,} bytes")
    return 0 if equal else 1


def _write_parts(run: Any, options: argparse.Namespace, parts: Path) -> dict[str, Any]:
    """Write all members of the pack but the observations; returns what ``pack.json`` says."""
    from lightning_rl.cli.pack.archive import FORMAT, MOST_PROCESSES
    from lightning_rl.cli.pack.configuration import PackedConfiguration, anonymous, write_code
    from lightning_rl.cli.pack.rollouts import packed, secrets_in
    from lightning_rl.cli.pack.symptoms import median_norm
    from lightning_rl.cli.pack.trees import write_tree
    from lightning_rl.cli.rerun.run import config_in
    from lightning_rl.config.yaml_text import dump_yaml
    from lightning_rl.data.rollouts.log import RerunLog

    iteration, before = options.iteration, options.iteration - 1
    outcomes = run.outcomes_with(iteration)
    ranks = outcomes[iteration].ranks
    if ranks > MOST_PROCESSES:
        raise DataError(
            f"iteration {iteration} was trained by {ranks} processes, and a pack is made again by "
            f"{MOST_PROCESSES} at most; send the run's directory, for lightning-rl rerun"
        )
    config = config_in(run.config_of(before)[1])
    made = PackedConfiguration(config, parts, before == 0, options.with_code)
    (parts / "config.yaml").write_text(dump_yaml(made.tree), encoding="utf-8")
    if before > 0:
        write_tree(_checkpoint(run, before, config), parts / "checkpoint")
    log, secrets = RerunLog(parts), 0
    for rank in range(ranks):
        rollouts = run.log.rollouts(iteration, rank)
        secrets += secrets_in(rollouts)
        log.write_rollouts(iteration, rank, [packed(r, options.texts == "hash") for r in rollouts])
    if secrets:
        made.left_out.append(f"{secrets} secrets in texts of rollouts; their tokens are packed")
    if options.texts == "hash":
        made.left_out.append("texts of rollouts; their tokens are packed")
    for version in (before, iteration):
        if version in outcomes:
            log.write_outcome(outcomes[version])
    code: list[str] = []
    if options.with_code:
        code = write_code([made.tree["model"], made.tree["trainer"]], parts / "code")
    return {
        "format": FORMAT,
        "iteration": iteration,
        "processes": ranks,
        "texts": options.texts,
        "code": code,
        "base": anonymous(options.base),
        "bases": {},
        "median_grad_norm": median_norm(outcomes.values()),
        "left_out": made.left_out,
    }


_NOT_READ = (
    "loops",
    "callbacks",
    "hparams_name",
    "hyper_parameters",
    "hparams_type",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
    "RecordedBatches",
)
"""Keys of a checkpoint that resume a run, but that a rerun does not read."""


def _checkpoint(run: Any, version: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of a version: as it was kept, or made again, or as the run resumed."""
    from lightning_rl.cli.pack.observation import Beginning
    from lightning_rl.cli.rerun.rebuild import remade
    from lightning_rl.cli.rerun.run import KeptWeights

    kept = next((k for k in run.kept if k.version == version), None)
    resumed = run.saved_otherwise(kept or KeptWeights(version, None))
    if kept is not None and not resumed:
        checkpoint = kept.load()
    else:
        # Only a training that begins there has the optimizer's new settings.
        begun = Beginning(version)
        observers, last = ([begun], version + 1) if resumed else ([], version)
        with remade(run, last, last - 1, None, observers) as made:
            known = {v: o for v, o in run.log.outcomes().items() if v <= version}
            differs = made.diverged_at(known)
            checkpoint = begun.checkpoint if resumed else made.checkpoint
        if differs is not None:
            raise DataError(
                f"version {version} has no checkpoint, and made again from {made.kept} its weights "
                f"differ from the recorded ones since version {differs}; pack where the run was "
                "trained, or an iteration after a checkpoint"
            )
    data = config["data"]["class_path"].rpartition(".")[2]
    checkpoint = {k: v for k, v in checkpoint.items() if k not in (*_NOT_READ, data)}
    # The configuration is the pack's, whose paths are others; it would be compared with this one.
    told = checkpoint["lightning_rl"]
    identity = told.get("run") or {}
    checkpoint["lightning_rl"] = told | {"run": identity | {"configuration": {}}}
    return checkpoint


def _sizes(parts: Path) -> list[str]:
    """Return a line with the size of each part, in bytes."""
    from lightning_rl.cli.pack.archive import members_of

    kinds = {
        "checkpoint.": "weights and optimizer",
        "models/": "models",
        "rerun/": "rollouts and checksums",
        "code/": "code",
        "config.yaml": "configuration",
    }
    sizes = {name: (parts / name).stat().st_size for name in members_of(parts)}
    found = {
        what: sum(size for name, size in sizes.items() if name.startswith(start))
        for start, what in kinds.items()
    }
    return [f"{what:<23} {size:>15,} bytes" for what, size in found.items() if size]


def _try(
    about: dict[str, Any], parts: Path, run: Path, trust: Sequence[str], say: Callable[..., None]
) -> bool:
    """Make the update from the pack, and add what was observed; True if it is as recorded."""
    from lightning_rl.cli.pack.observation import made_again, write_observed
    from lightning_rl.cli.pack.run_directory import make_run
    from lightning_rl.cli.rerun.run import RecordedRun

    make_run(about, parts, run)
    update = made_again(RecordedRun(run, trust), about["iteration"])
    write_observed(about, parts, update.seen, update.rerun.environment)
    say("made again from the pack:", *update.rerun.lines())
    return update.rerun.equal
