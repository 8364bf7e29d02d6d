"""``lightning-rl audit``: check that a run's records are unchanged and reproducible."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import ConfigError, require_at_least

if TYPE_CHECKING:
    from lightning_rl.cli.audit.records import Records
    from lightning_rl.cli.rerun.run import RecordedRun

_SEED = "LIGHTNING_RL_AUDIT_SEED"
"""Environment variable with the drawn seed, for the other training processes, which must draw the
same.
"""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "audit",
        "Check a run's files against its ledger, and repeat a share of its iterations.",
        "Exit status: 0 if nothing was changed and all results are reproduced, else 1.",
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    share = "share of its iterations to train again, drawn at random; 0: none (default: 0.1)"
    parser.add_argument("--share", metavar="S", type=float, default=0.1, help=share)
    rollouts = "rollouts of each such iteration to generate and grade again (default: 1)"
    parser.add_argument("--rollouts", metavar="N", type=int, default=1, help=rollouts)
    head = "a hash of the ledger, noted while the run was trusted, that its chain must contain"
    parser.add_argument("--head", metavar="HASH", help=head)
    parser.add_argument(
        "--seed", metavar="K", type=int, help="draw the same iterations as an earlier audit"
    )
    parser.add_trust()
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.share <= 1:
        raise ConfigError(f"--share {parsed.share:g} must be in [0, 1]")
    if parsed.head is not None and len(parsed.head) < _SHORTEST_HEAD:
        raise ConfigError(
            f"--head {parsed.head} must be at least {_SHORTEST_HEAD} of the 64 digits of a hash"
        )
    require_at_least(0, rollouts=parsed.rollouts, seed=parsed.seed)
    return parsed


_SHORTEST_HEAD = 16


def main(arguments: Sequence[str]) -> int:
    """Audit a run, print the findings, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.audit.examination import examine
    from lightning_rl.cli.process import printable
    from lightning_rl.cli.rerun.run import RecordedRun
    from lightning_rl.run.known_warnings import without_info

    run = RecordedRun(options.run, CommandParser.trust_in(options))
    records = examine(run, options.head)

    @rank_zero_only
    def say(*lines: str) -> None:
        print(*(printable(line).replace("\n", " ") for line in lines), sep="\n", flush=True)

    say(*told_of(records))
    good = not records.changed
    if options.share > 0:
        with without_info():
            good = _again(run, records, options, say) and good
    say("nothing was changed" if good else "CHANGED")
    return 0 if good else 1


def told_of(records: "Records") -> list[str]:
    """Return the findings of the checks that repeat nothing, as lines of text."""
    starts = len(records.begins)
    lines = [
        f"ledger: {records.entries} entries, one chain; {len(records.iterations)} iterations, "
        f"{starts} start{'s' * (starts != 1)}, {len(records.checkpoints)} checkpoints"
    ]
    if records.twice:
        differ = len(records.otherwise)
        how = f"{differ} of them with a different result" if differ else "each with the same result"
        lines.append(f"{len(records.twice)} iterations were trained twice, after a resume: {how}")
    lines += [f"not in the ledger, so not verified: {name}" for name in records.unknown]
    lines += [f"CHANGED: {what}" for what in records.changed]
    if not records.changed:
        lines.append(
            "configuration, rollouts, metrics, results, weights' checksums, checkpoints: unchanged"
        )
    return lines


def _again(
    run: "RecordedRun", records: "Records", options: argparse.Namespace, say: Callable[..., Any]
) -> bool:
    """Repeat a share of the iterations, and some rollouts of each, and report all; True if all
    agree.
    """
    from lightning_rl.cli.audit.repetition import (
        drawn_iterations,
        drawn_rollouts,
        iteration_again,
        rollouts_again,
    )

    seed = options.seed
    if seed is None:
        seed = int(os.environ.setdefault(_SEED, str(int.from_bytes(os.urandom(4), "big"))))
    random = Random(seed)
    iterations = drawn_iterations(run, options.share, random)
    if not iterations:
        say("no iteration can be trained again: the run kept no rollouts")
        return True
    say(f"repeating {len(iterations)} of them, drawn with --seed {seed}")
    good = True
    for iteration in iterations:
        verdict = iteration_again(run, iteration, records.environments[iteration])
        say(verdict.line())
        good = good and verdict.good
    for version, drawn in drawn_rollouts(run, iterations, options.rollouts, random).items():
        for found in rollouts_again(run, version, drawn):
            say(*found.lines())
            good = good and found.good
    return good
