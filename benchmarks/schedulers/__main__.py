"""How much does each way of scheduling rollouts gain, and what does it cost in staleness?

    python -m benchmarks.schedulers [--save] [--plot docs/images/schedulers.png]
    python -m benchmarks.schedulers --dynamic [--save]
    OMP_NUM_THREADS=1 python -m benchmarks.schedulers --real [--save]
    OMP_NUM_THREADS=1 python -m benchmarks.schedulers --cores [--save]

The collectors themselves run on a virtual clock (`support/simulate.py`), so no GPU is needed and
every run gives the same numbers. The engine decodes a batch of 256 at most, in 10 ms + 0.06 ms x
requests per token; lengths differ between prompts and between rollouts of one prompt. Trainer and
engine have devices of their own, but for "Sync, colocated": there both use all devices in turn, so
training takes half as long, and twice as many requests decode at the same speed.

`--dynamic` simulates what becomes of groups that filters reject, that miss a deadline or that have
become too stale, with the lengths of a real model's completions.

`--real` trains sort_digits instead, with vLLM, on the real clock; a reward that sleeps stands for a
slow judge or environment. `--cores` does so with transformers and nothing that sleeps: what is left
is that engine and trainer compute at once, a core each. The last line is JSON. `--save` writes the
table, of the simulation that of lognormal lengths and 30% of training, into docs/collectors.md.
"""

from pathlib import Path
from typing import Any

from benchmarks.schedulers.dynamic import dynamic, dynamic_table
from benchmarks.schedulers.simulated import (
    BOUND,
    COLOCATED,
    HEADLINE,
    LENGTHS,
    SCHEDULERS,
    STREAMED,
    TRAIN_SHARES,
    find,
    measure,
    speed,
)
from benchmarks.schedulers.tables import real_table, table
from benchmarks.support.results import parser_of, report, write_block

PAGE = Path(__file__).parents[2] / "docs" / "collectors.md"


def simulated(iterations: int, plot: str | None, save: bool) -> dict[str, Any]:
    """Simulate all schedulers on all loads."""
    rows = [
        measure(lengths, share, scheduler, iterations)
        for lengths in LENGTHS
        for share in TRAIN_SHARES
        for scheduler in SCHEDULERS
    ]
    for lengths in LENGTHS:
        for share in TRAIN_SHARES:
            print(f"\n{lengths}, {share:.0%} training", *table(rows, (lengths, share)), sep="\n")
    if save:
        write_block(PAGE, "schedulers", table(rows, HEADLINE))
    if plot is not None:
        from benchmarks.schedulers.plot import draw

        draw(rows, plot)
    sync, colocated, asynchronous = (
        find(rows, *HEADLINE, name) for name in ("Sync", COLOCATED, f"Async S={BOUND}")
    )
    return {
        "async_over_sync": speed(asynchronous, rows),
        "async_over_colocated": asynchronous.tokens_per_s / colocated.tokens_per_s,
        "staleness_max": asynchronous.staleness_max,
        "staleness_bound": BOUND,
        "bubble_sync": sync.engine_bubble,
        "bubble_async": asynchronous.engine_bubble,
        "streamed_over_sync": speed(find(rows, *HEADLINE, STREAMED), rows),
        "streamed_over_sync_at_half": speed(find(rows, "lognormal", 0.5, STREAMED), rows),
        "partial_over_sync": speed(find(rows, *HEADLINE, "Partial 1.5"), rows),
        "tail_batching_over_sync": speed(find(rows, *HEADLINE, "TailBatching 1.25"), rows),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--plot", help="write the figure to this file")
    parser.add_argument("--dynamic", action="store_true", help="filters, deadlines and aborts")
    parser.add_argument("--real", action="store_true", help="train with vLLM on the real clock")
    parser.add_argument("--cores", action="store_true", help="the same with transformers, at once")
    arguments = parser.parse_args()
    if arguments.real or arguments.cores:
        from benchmarks.schedulers.real import on_cores, with_latency

        for kind, wanted, measure_all in (
            ("real", arguments.real, with_latency),
            ("cores", arguments.cores, on_cores),
        ):
            if wanted:
                result = measure_all()
                report(f"schedulers-{kind}", result, arguments.save)
                if arguments.save:
                    write_block(PAGE, f"schedulers-{kind}", real_table(result))
    elif arguments.dynamic:
        result = dynamic(arguments.iterations)
        print(*dynamic_table(result), sep="\n")
        report("schedulers-dynamic", result, arguments.save)
        if arguments.save:
            write_block(PAGE, "schedulers-dynamic", dynamic_table(result))
    else:
        result = simulated(arguments.iterations, arguments.plot, arguments.save)
        report("schedulers", result, arguments.save)


if __name__ == "__main__":
    main()
