"""``lightning-rl rerun``: repeats a recorded rollout or iteration."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import ConfigError, require_at_least

if TYPE_CHECKING:
    from lightning_rl.cli.rerun.calls import CallsRerun
    from lightning_rl.cli.rerun.rollouts import RolloutRerun


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if options are invalid or contradict each other.
    """
    parser = CommandParser(
        "rerun",
        "Repeat a recorded rollout or iteration, and report its first difference.",
        "Exit status: 0 if the result is equal (or was forked), else 1.",
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rollout", metavar="ID", help="generate it again, token by token")
    what.add_argument(
        "--iteration", metavar="K", type=int, help="train it again on its recorded rollouts"
    )
    score = "with --rollout: only score its tokens, with the weights of version V"
    parser.add_argument("--version", metavar="V", type=int, help=score)
    calls = "with --rollout: generate each of its recorded calls, alone, without its agent"
    parser.add_argument("--calls", action="store_true", help=calls)
    branch = "with --rollout: fork it before its N-th call, and show the results of other answers"
    parser.add_argument("--branch", metavar="N", type=int, help=branch)
    count = "with --branch: number of branches (default: 4)"
    parser.add_argument("--count", metavar="K", type=int, help=count)
    out = "with --branch: add the branches to this rollout file"
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    start = "with --iteration: start from the kept weights of version C (default: the nearest)"
    parser.add_argument("--since", metavar="C", type=int, help=start)
    parser.add_trust()
    parsed = parser.parse_args(arguments)
    for option, partner in (
        ("version", "rollout"),
        ("since", "iteration"),
        ("branch", "rollout"),
        ("count", "branch"),
        ("out", "branch"),
    ):
        value = getattr(parsed, option)
        if value is not None and getattr(parsed, partner) is None:
            raise ConfigError(f"--{option} {value} requires --{partner}; add that, or leave it out")
    if parsed.calls and (parsed.rollout is None or parsed.version is not None):
        raise ConfigError("--calls requires --rollout and excludes --version; leave it out")
    if parsed.branch is not None and (parsed.calls or parsed.version is not None):
        raise ConfigError("--branch excludes --calls and --version; leave these out")
    require_at_least(1, iteration=parsed.iteration, branch=parsed.branch, count=parsed.count)
    require_at_least(0, version=parsed.version, since=parsed.since)
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Repeat the rollout or iteration, print the result, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.rerun.branch import branch_rollout
    from lightning_rl.cli.rerun.calls import rerun_calls
    from lightning_rl.cli.rerun.compare import rerun_iteration
    from lightning_rl.cli.rerun.rollouts import rerun_rollout
    from lightning_rl.cli.rerun.run import RecordedRun

    trust = [f"--trust={module}" for module in options.trust]
    run = RecordedRun(options.run, ["--trusted_only"] * options.trusted_only + trust)
    if options.iteration is not None:
        iteration = rerun_iteration(run, options.iteration, options.since)
        rank_zero_only(print)("\n".join(iteration.lines()))  # the others only help to train
        return 0 if iteration.equal else 1
    if options.branch is not None:
        count = 4 if options.count is None else options.count
        branched = branch_rollout(run, options.rollout, options.branch - 1, count, options.out)
        if branched is not None:
            print("\n".join(branched.lines()))
        return 0
    equal = True
    again: Iterator[CallsRerun | RolloutRerun]
    if options.calls:
        again = rerun_calls(run, options.rollout)
    else:
        again = rerun_rollout(run, options.rollout, options.version)
    for rerun in again:
        print("\n".join(rerun.lines()), flush=True)
        equal = equal and rerun.equal
    return 0 if equal else 1
