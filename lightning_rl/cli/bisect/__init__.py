"""``lightning-rl bisect``: finds the iteration with which a metric dropped, and its cause."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rl.cli.process import CommandParser, parse_duration, printable
from lightning_rl.errors import ConfigError, require_at_least

if TYPE_CHECKING:
    from lightning_rl.cli.bisect.search import Bisection


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if options are invalid or contradict each other.
    """
    parser = CommandParser(
        "bisect",
        "Find the iteration with which a metric dropped, and what in its update did that, by "
        "evaluating the run's versions and training iterations again without what is suspect.",
        "Exit status: 0 if there is no drop beyond the noise, 1 if one was found.",
    )
    parser.add_argument("run", type=Path, help="the directory of a run")
    metric = "a recorded metric that should be high (default: eval/accuracy)"
    parser.add_argument("--metric", default="eval/accuracy", help=metric)
    good = "version of the weights before the drop (default: before the largest recorded drop)"
    parser.add_argument("--good", metavar="V", type=int, help=good)
    parser.add_argument("--bad", metavar="V", type=int, help="version after the drop")
    budget = "begin nothing more after this time, such as 90s, 20m or 2h (default: 20m)"
    parser.add_argument("--budget", metavar="TIME", default="20m", help=budget)
    page = "HTML file to write the result to (default: bisect.html)"
    parser.add_argument("--page", metavar="FILE", type=Path, default=Path("bisect.html"), help=page)
    parser.add_trust()
    parsed = parser.parse_args(arguments)
    parsed.seconds = parse_duration(parsed.budget, "--budget")
    require_at_least(0, good=parsed.good, bad=parsed.bad)
    if (parsed.good is None) != (parsed.bad is None):
        raise ConfigError("--good and --bad belong together; give both, or neither")
    if parsed.good is not None and parsed.good >= parsed.bad:
        raise ConfigError(f"--good {parsed.good} must be < --bad {parsed.bad}; exchange them")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Bisect a run, print the result, write its page, and return the exit status."""
    options = parse_arguments(arguments)
    from lightning.pytorch.utilities import rank_zero_only

    trust = CommandParser.trust_in(options)
    window = None if options.good is None else (options.good, options.bad)
    verdict = bisect(
        options.run, options.metric, window, options.seconds, options.page, options=trust
    )
    say = rank_zero_only(print)  # the other ranks only help to train and to evaluate
    say(printable("\n".join(verdict.lines())))
    say(f"page: {options.page}")
    return 0 if verdict.iteration is None else 1


def bisect(
    path: Path,
    metric: str = "eval/accuracy",
    window: tuple[int, int] | None = None,
    seconds: float = 1200.0,
    page: Path | None = None,
    options: Sequence[str] = (),
) -> "Bisection":
    """Look for the iteration with which a metric dropped, and its cause; tell the progress.

    Args:
        path: the directory of a run.
        metric: a recorded metric.
        window: versions before and after the drop; None: those of the largest recorded drop.
        seconds: no trial begins after this time.
        page: an HTML file to write; None: none.
        options: command-line options for building the run's parts.

    Raises:
        ConfigError: if the run goes on, or its configuration does not work here.
        DataError: if the run kept too little.
        EngineError: if the engine fails.
    """
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.bisect.curve import Window, cost_of, curve_of, largest_drop
    from lightning_rl.cli.bisect.page import page_of
    from lightning_rl.cli.bisect.search import Bisection, Search, told_apart
    from lightning_rl.cli.bisect.trials import SCORES, Trials
    from lightning_rl.cli.rerun.run import RecordedRun
    from lightning_rl.run.files.rundir import require_free
    from lightning_rl.run.known_warnings import without_info

    @rank_zero_only
    def say(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    run = RecordedRun(path, options)
    require_free(run.path)
    outcomes = run.log.outcomes()
    rows = {version: made.metrics for version, made in outcomes.items()}
    curve = curve_of(rows, metric)
    chosen = largest_drop(curve) if window is None else Window(*window)
    if chosen is None:
        verdict = Bisection(metric, curve, None)
    elif metric not in SCORES:
        verdict = told_apart(curve, chosen, metric)
    else:
        say(cost_of(chosen, rows, seconds))
        trials = Trials(run, SCORES[metric], seconds)
        with without_info():
            verdict = Search(trials, rows, say).run(metric, curve, chosen, outcomes)
    if page is not None:
        rank_zero_only(page.write_text)(page_of(verdict, run.path.name), encoding="utf-8")
    return verdict
