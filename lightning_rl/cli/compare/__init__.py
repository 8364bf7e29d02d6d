"""``lightning-rl compare``: train configurations on the same seeds until one is better, or not."""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from lightning_rl.cli.process import CommandParser, duration, parse_duration, printable
from lightning_rl.errors import ConfigError, RunInterrupted, require_at_least, require_finite

_EPILOG = """\
A FILE may be several that are merged in order: base.yaml+faster.yaml. All other options are those
of fit, for each configuration: --trainer.max_epochs 2, --trusted_only.
The same command continues a comparison that was stopped, and asks its runs again with another
--metric or --target.
Exit status: 0 if all is decided, 1 if not or if a run failed, 2 for a bad configuration.
"""
_SIGINT_STATUS = 130


class Request(NamedTuple):
    """The command line: its own options, the ``files`` to compare, the base first, and the options
    of ``fit``.
    """

    own: argparse.Namespace
    files: list[str]
    overrides: list[str]


def read_options(arguments: Sequence[str]) -> Request:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value, or the number of files is wrong.
    """
    parser = CommandParser(
        "compare",
        "Train two configurations, or more, on the same seeds in turns, and stop as soon as it is "
        "known which has the higher metric, at the last seed, or when the budget is spent.",
        _EPILOG,
    )
    parser.usage = (
        "%(prog)s A.yaml B.yaml [options]\n       %(prog)s A.yaml ... --against BASE.yaml"
    )
    parser.add_argument("--against", metavar="BASE", help="compare each file with this one")
    parser.add_argument("--seeds", type=int, default=8, help="seeds at most (default: 8)")
    parser.add_argument("--budget", metavar="TIME", help="stop in time: 90s, 20m, 2h")
    metric = "compare its last value (default: eval/accuracy)"
    parser.add_argument("--metric", default="eval/accuracy", help=metric)
    target = "compare the seconds until the metric is first at least X"
    parser.add_argument("--target", type=float, metavar="X", help=target)
    out = "folder of the runs and results (default: runs/compare/NAMES)"
    parser.add_argument("--out", type=Path, help=out)
    # argparse would take the value of one of fit's options for a positional argument.
    files = list(takewhile(lambda word: not word.startswith("-"), arguments))
    own, overrides = parser.parse_known_args(arguments[len(files) :])
    require_at_least(2, **{"--seeds": own.seeds})
    require_finite(**{"--target": own.target})
    own.budget = math.inf if own.budget is None else parse_duration(own.budget, "--budget")
    if own.against is not None:
        files.insert(0, own.against)
    if len(files) < 2 or (own.against is None and len(files) > 2):
        other = f" (options of fit: {' '.join(overrides)})" if overrides else ""
        raise ConfigError(
            f"compare takes two configurations, A.yaml B.yaml, or one or more --against BASE.yaml, "
            f"before all options, but got {len(files)}{other}"
        )
    return Request(own, files, overrides)


def main(arguments: Sequence[str]) -> int:
    """Compare configurations; returns the exit status."""
    own, files, overrides = read_options(arguments)
    from lightning_rl.cli.compare import report
    from lightning_rl.cli.compare.comparison import Comparison
    from lightning_rl.cli.compare.configurations import read_contenders
    from lightning_rl.cli.compare.outcomes import FinalValue, SecondsToTarget
    from lightning_rl.cli.compare.runs import BudgetSpent, Runs
    from lightning_rl.run.files.rundir import holding, require_writable

    def tell(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    contenders = read_contenders(files, overrides, own.metric)
    base, *others = (contender.name for contender in contenders)
    folder = own.out or Path("runs", "compare", "-".join([base, *others]))
    require_writable(folder, "--out")
    asks = FinalValue(own.metric) if own.target is None else SecondsToTarget(own.metric, own.target)
    with holding(folder):
        comparison = Comparison(base, others, asks, Runs(folder, contenders))
        for contender in contenders[1:]:
            changes = "; ".join(contenders[0].changes_to(contender))
            tell(f"{contender.name} differs from {base}: {changes}")
        limit = "" if own.budget == math.inf else f", for at most {duration(own.budget)}"
        tell(f"at most {own.seeds} rounds of {len(files)} runs{limit}, in {folder}")
        try:
            for seconds in comparison.train(own.seeds, own.budget):
                if seconds:
                    tell(f"{report.table(comparison)}\nat most {duration(seconds)} more")
        except BudgetSpent as spent:
            tell(f"{spent}; the same command continues")
        except KeyboardInterrupt:
            raise RunInterrupted(
                "interrupted; the same command continues", _SIGINT_STATUS
            ) from None
        print(printable("\n".join([report.table(comparison), *report.verdicts(comparison)])))
        report.write(comparison)
        tell(f"{report.RESULT}, {report.PICTURE} and {report.PAGE} are in {folder}")
    return int(bool(comparison.undecided()))
