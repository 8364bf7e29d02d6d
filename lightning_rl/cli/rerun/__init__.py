"""``lightning-rl rerun``: repeats a recorded rollout or iteration, also with a change."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rl.cli.process import CommandParser
from lightning_rl.errors import ConfigError, require_at_least, require_finite

if TYPE_CHECKING:
    from lightning_rl.cli.rerun.calls import CallsRerun
    from lightning_rl.cli.rerun.rollouts import RolloutRerun
    from lightning_rl.cli.rerun.run import RecordedRun


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if options are invalid or contradict each other.
    """
    parser = CommandParser(
        "rerun",
        "Repeat a recorded rollout or iteration, and report its first difference; or train "
        "iterations again with a change, and report what becomes of the metrics.",
        "Exit status: 0 if the result is equal (or was forked, or the change tells something), "
        "else 1.",
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rollout", metavar="ID", help="generate it again, token by token")
    what.add_argument(
        "--iteration", metavar="K", type=int, help="train it again on its recorded rollouts"
    )
    to = "train iterations up to this one again, with a change: --without, --set, or both"
    what.add_argument("--to", metavar="K", type=int, help=to)
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
    start = "with --iteration or --to: start from the kept weights of version C (default: the "
    start += "nearest)"
    parser.add_argument("--since", metavar="C", type=int, help=start)
    _add_change(parser)
    parser.add_trust()
    parsed = parser.parse_args(arguments)
    for option, partner in (
        ("version", "rollout"),
        ("branch", "rollout"),
        ("count", "branch"),
        ("out", "branch"),
    ):
        value = getattr(parsed, option)
        if value is not None and getattr(parsed, partner) is None:
            raise ConfigError(f"--{option} {value} requires --{partner}; add that, or leave it out")
    if parsed.since is not None and parsed.iteration is None and parsed.to is None:
        raise ConfigError(
            f"--since {parsed.since} requires --iteration or --to; add one, or leave it out"
        )
    _require_change(parsed)
    if parsed.calls and (parsed.rollout is None or parsed.version is not None):
        raise ConfigError("--calls requires --rollout and excludes --version; leave it out")
    if parsed.branch is not None and (parsed.calls or parsed.version is not None):
        raise ConfigError("--branch excludes --calls and --version; leave these out")
    require_at_least(1, iteration=parsed.iteration, branch=parsed.branch, count=parsed.count)
    require_at_least(0, version=parsed.version, since=parsed.since)
    return parsed


def _add_change(parser: CommandParser) -> None:
    """Add the options of a change."""
    without = (
        "with --to: leave this rollout out, or all whose id begins so: 11/3 is a group, 11 all "
    )
    without += "of iteration 11; may be repeated"
    parser.add_argument("--without", metavar="ID", action="append", default=[], help=without)
    setting = "with --to: another setting of the update, such as "
    setting += "model.init_args.optimizer.init_args.lr=1e-5; may be repeated"
    parser.add_argument(
        "--set", metavar="KEY=VALUE", dest="settings", action="append", default=[], help=setting
    )
    evaluate = "with --to: also compare the results on the run's held-out prompts"
    parser.add_argument("--evaluate", action="store_true", help=evaluate)
    share = "with --to: conclude nothing if the effective share of an iteration's rollouts is less "
    share += "than this part of the unchanged rerun's (default: 0.5)"
    parser.add_argument("--least_share", metavar="S", type=float, help=share)


def _require_change(parsed: argparse.Namespace) -> None:
    """Check that a change has a last iteration, and this a change."""
    changes = {"--without": parsed.without, "--set": parsed.settings, "--evaluate": parsed.evaluate}
    given = [name for name, value in changes.items() if value]
    given += ["--least_share"] * (parsed.least_share is not None)
    if given and parsed.to is None:
        raise ConfigError(f"{given[0]} requires --to K, the last iteration to train again; add it")
    if parsed.to is not None and not (parsed.without or parsed.settings):
        raise ConfigError(
            f"--to {parsed.to} requires a change: --without ID, or --set KEY=VALUE; to repeat an "
            "iteration as it was, use --iteration"
        )
    require_at_least(1, to=parsed.to)
    require_at_least(0, least_share=parsed.least_share)
    require_finite(least_share=parsed.least_share)
    if parsed.to is not None and parsed.since is not None and parsed.since >= parsed.to:
        raise ConfigError(f"--since {parsed.since} must be < --to {parsed.to}; lower it")


def main(arguments: Sequence[str]) -> int:
    """Repeat the rollout or iteration, print the result, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.rerun.branch import branch_rollout
    from lightning_rl.cli.rerun.calls import rerun_calls
    from lightning_rl.cli.rerun.compare import rerun_iteration
    from lightning_rl.cli.rerun.rollouts import rerun_rollout
    from lightning_rl.cli.rerun.run import RecordedRun

    run = RecordedRun(options.run, CommandParser.trust_in(options))
    if options.iteration is not None:
        iteration = rerun_iteration(run, options.iteration, options.since)
        rank_zero_only(print)("\n".join(iteration.lines()))  # the others only help to train
        return 0 if iteration.equal else 1
    if options.to is not None:
        return _what_if(run, options)
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


def _what_if(run: "RecordedRun", options: argparse.Namespace) -> int:
    """Train iterations again with a change, print the result, and return the exit status."""
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.rerun.change import RerunChange
    from lightning_rl.cli.rerun.what_if import LEAST_SHARE, what_if

    change = RerunChange(tuple(options.without), tuple(options.settings))
    least = LEAST_SHARE if options.least_share is None else options.least_share
    found = what_if(run, change, options.to, options.since, options.evaluate, least)
    rank_zero_only(print)("\n".join(found.lines()))
    return found.status
