"""What does an RL iteration of a large model cost on 8 to 1,024 GPUs? A simulation.

    python -m benchmarks.scaling_simulated [--groups 64] [--save]

The collectors themselves run on a virtual clock (`support.simulate`). What a decoding step, an
update and a sync take is computed from the shapes of Qwen3 models and from constants, all of them
in `constants` with unit and source; the formulas are in `costs` and `sync`,
which follows this library's transports step by step. Lengths of rollouts are lognormal, as spread
as those that `scaling_lengths` has measured, and scaled to 8k and 32k.

The batch is the same for all numbers of GPUs. Synchronous runs use all of them in turn, which for
models of more than one GPU this library does not do yet; otherwise 1/2, 1/4 or 1/8 of them train.
An iteration's parts are seconds of the average GPU; `waiting` is what it idles, and what it loses
by decoding fewer rollouts at a time than fit.

`checks` compares the formulas with what others have published, and with results kept here; a ratio
of more than 1.25, or less than its inverse, is not reproduced. The last line is JSON.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.scaling_simulated.checks import all_checks
from benchmarks.scaling_simulated.constants import H100
from benchmarks.scaling_simulated.tables import (
    LONG,
    REPLICAS,
    check_table,
    iteration_table,
    runs,
    summary,
    sync_table,
    syncs,
)
from benchmarks.support.results import parser_of, report, write_block

DOCS = Path(__file__).parents[2] / "docs"
PICTURE = "images/scaling-simulated.svg"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--groups", type=int, default=H100.groups, help="of 8 rollouts, a batch")
    parser.add_argument("--figure", type=Path, help="draw it here")
    given = parser.parse_args()
    c = replace(H100, groups=given.groups)
    rows, checks = list(runs(c)), all_checks()
    few, many = syncs(c, REPLICAS), syncs(c, 64)
    print(
        "\n".join(
            [*iteration_table(rows, rows), "", *sync_table(few, many), "", *check_table(checks)]
        )
    )
    if given.figure or given.save:
        from benchmarks.scaling_simulated.plot import draw

        draw(rows, few, LONG, given.figure or DOCS / PICTURE)
    if given.save:
        shown = [row for row in rows if row.limit == LONG and row.gpus in (64, 256, 1024)]
        shown = [row for row in shown if row.model in ("8B", "235B-A22B")]
        figure = f"![Seconds of iterations by GPUs, and of syncs by transport]({PICTURE})"
        block = [figure, "", *iteration_table(shown, rows), "", *sync_table(few, many)]
        write_block(DOCS / "distributed.md", "scaling-simulated", block)
    report("scaling-simulated", summary(c, rows, checks), given.save)


if __name__ == "__main__":
    main()
