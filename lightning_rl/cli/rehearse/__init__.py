"""``lightning-rl rehearse``: a big run, tried as a small one on this machine."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lightning_rl.cli.process import CommandParser, printable
from lightning_rl.cli.requested import RequestedRun, Tree
from lightning_rl.errors import LightningRLError, require_at_least, require_finite

if TYPE_CHECKING:
    from lightning_rl.cli.rehearse.findings import RunFinding

_EPILOG = """\
All other options are those of fit: --config FILE, --data.group_size 16, --trusted_only; a FILE that
comes first is taken as --config FILE.
Exit status: 0 if nothing was found, 1 if the run would waste, 2 if it would fail.
"""


def own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the command itself, and all others, which are those of ``fit``.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "rehearse",
        "Try a run for little: look for faults that cost hours, then train, kill, resume, repeat, "
        "evaluate and export it with a tiny model of the same architecture, on this machine's CPU.",
        _EPILOG,
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the verdict as HTML")
    parser.add_argument("--no_run", action="store_true", help="look for faults, and train nothing")
    card = "GiB of each of the run's GPUs: say whether the run fits on them"
    parser.add_argument("--gpu_memory_gb", type=float, metavar="N", help=card)
    prices = "prices of a million tokens that a judge reads, and writes: say what they cost"
    parser.add_argument("--prices", type=float, nargs=2, metavar=("READ", "WRITTEN"), help=prices)
    # argparse would take the value of one of fit's options for a positional argument.
    named = list(arguments[:1]) if arguments and not arguments[0].startswith("-") else []
    own, rest = parser.parse_known_args([*arguments[len(named) :]])
    require_finite(**{"--gpu_memory_gb": own.gpu_memory_gb})
    require_at_least(0, **{"--prices": min(own.prices or [0])})
    return own, [*(f"--config={file}" for file in named), *rest]


def main(arguments: Sequence[str]) -> int:
    """Rehearse the run that ``fit`` would begin with these arguments; returns the exit status."""
    own, rest = own_options(arguments)
    words = [word for argument in rest for word in argument.split("=", 1)]
    configs = [word for flag, word in pairwise(words) if flag in ("--config", "-c")]
    from lightning_rl.cli.app import read
    from lightning_rl.cli.rehearse.findings import Kind, RunFinding, RunVerdict

    request, found = read(rest), list[RunFinding]()
    with TemporaryDirectory(prefix="lightning_rl_") as scratch:
        try:
            told = rehearse(request, Path(scratch), not own.no_run, own.gpu_memory_gb, own.prices)
            for finding in told:
                found.append(finding)
                print(printable(f"{finding.kind.value}: {finding}"), file=sys.stderr, flush=True)
        except LightningRLError as error:  # fit would raise it too
            found.append(RunFinding(Kind.FAILS, "", str(error)))
    verdict = RunVerdict(Path(configs[0]).name if configs else "the run", found)
    print(printable("\n".join(verdict.lines())))
    if own.page is not None:
        own.page.write_text(verdict.page(), encoding="utf-8")
    return verdict.status


def rehearse(
    request: RequestedRun,
    folder: Path,
    run: bool = True,
    card_gb: float | None = None,
    prices: Sequence[float] | None = None,
) -> Iterator["RunFinding"]:
    """Yield what a rehearsal finds, as it finds it.

    Args:
        request: the run.
        folder: for the small model and its run; the caller deletes it.
        run: also train, unless a fault was found that would end the run.
        card_gb: GiB of memory of each GPU; None: the memory is not planned.
        prices: of a million tokens that a judge reads, and writes; None: unknown.

    Raises:
        ConfigError: if ``fit`` would refuse the configuration.
        DataError: if it would refuse the data.
    """
    from lightning_rl.cli.check.command import Built
    from lightning_rl.cli.rehearse.another_process import compare_with_another_process
    from lightning_rl.cli.rehearse.findings import Kind, RunFinding
    from lightning_rl.cli.rehearse.judge_cost import Prices
    from lightning_rl.cli.rehearse.predictions import predict
    from lightning_rl.cli.rehearse.smaller import Smaller, without_weights, world_size
    from lightning_rl.cli.rehearse.stages import Stages
    from lightning_rl.collect.base import CollectingDataModule
    from lightning_rl.config.yaml_text import dump_yaml
    from lightning_rl.datamodule import RLDataModule
    from lightning_rl.learn.policies import RolloutModule

    def written(name: str, tree: Tree) -> Path:
        file = folder / name
        file.write_text(dump_yaml(tree), encoding="utf-8")
        return file

    tree, options = request
    planned = written("planned.yaml", without_weights(tree))
    cli = Built(["--config", str(planned), *options], str(folder / "planned"))
    data, kinds = cli.datamodule, dict[str, set[Kind]]()

    def noted(findings: Iterator[RunFinding]) -> Iterator[RunFinding]:
        for finding in findings:
            kinds.setdefault(finding.key, set()).add(finding.kind)
            yield finding

    known, paid = None if prices is None else Prices(*prices), list[str]()
    yield from noted(predict(cli, tree, world_size(tree), card_gb, known, paid))
    rollouts = isinstance(cli.model, RolloutModule)
    if rollouts and isinstance(data, RLDataModule):
        sound = kinds.get("data.rewards", set()) <= {Kind.TRIED}
        said = paid if sound else []
        yield from noted(compare_with_another_process(data, said, planned, options))
    evaluates = not isinstance(data, CollectingDataModule) or data.evaluates
    if not run or any(Kind.FAILS in found for found in kinds.values()):
        return
    notes: list[RunFinding] = []
    small = written("small.yaml", Smaller(tree, folder, notes.append).make())
    yield from notes
    yield from Stages(small, folder, options, rollouts, evaluates).findings()
