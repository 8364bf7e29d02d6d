"""Every run and push that is simulated, as tables and as the last line."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.scaling_simulated.checks import Check, result_of, typical_factor
from benchmarks.scaling_simulated.constants import MODELS, Constants, table_of
from benchmarks.scaling_simulated.costs import Lengths, Replica
from benchmarks.scaling_simulated.runs import (
    ASYNC,
    ASYNC_SHARED,
    MODES,
    PARTS,
    SYNC,
    Row,
    load_of,
    run,
)
from benchmarks.scaling_simulated.sync import TRANSPORTS, Push

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
LONG, SHORT = 32_768, 8_192
SYNCED = ("8B", "32B", "235B-A22B")
REPLICAS = 8


def runs(c: Constants, counts: Sequence[int] = GPUS) -> Iterator[Row]:
    """All models at 32k, and 8B at 8k; a model appears where it fits."""
    long, short = load_of(c, LONG), load_of(c, SHORT)
    for name, model in MODELS.items():
        modes = (*MODES, ASYNC_SHARED) if name in SYNCED else MODES
        cases = [(long, mode) for mode in modes]
        if name == "8B":
            cases += [(short, mode) for mode in MODES]
        for load, mode in cases:
            for gpus in counts:
                if (row := run(c, model, load, gpus, mode)) is not None:
                    yield row


def syncs(c: Constants, replicas: int) -> dict[str, dict[str, float]]:
    """Seconds of a push to so many replicas, from as many GPUs as they have, by model."""
    short = Lengths.of([1000.0])
    found: dict[str, dict[str, float]] = {}
    for name in SYNCED:
        gpus = Replica.smallest(c, MODELS[name], short).gpus
        push = Push(c, MODELS[name], replicas * gpus, replicas, gpus)
        found[name] = {transport: formula(push) for transport, formula in TRANSPORTS.items()}
    return found


def efficiency(row: Row, rows: Sequence[Row]) -> float:
    """Tokens per second and GPU, over those of the synchronous run on the fewest GPUs."""
    same = [r for r in rows if (r.model, r.limit, r.mode) == (row.model, row.limit, SYNC.name)]
    return row.tokens_per_s_gpu / min(same, key=lambda r: r.gpus).tokens_per_s_gpu


def record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """For the result."""
    derived = {"waiting_share": row.waiting_share, "efficiency": efficiency(row, rows)}
    return vars(row) | derived


def pick(rows: Sequence[Row], model: str, gpus: int, mode: str) -> Row:
    found = (row for row in rows if (row.model, row.gpus, row.mode) == (model, gpus, mode))
    return next(row for row in found if row.limit == LONG)


def iteration_table(shown: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Markdown; ``rows``: all, for the efficiency."""
    lines = [
        "| model, limit | GPUs | mode | s per iteration | generate, logprob, train, sync, waiting "
        "| waiting | tokens/s/GPU | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in shown:
        parts = ", ".join(f"{getattr(row, part):.3g}" for part in PARTS)
        lines.append(
            f"| {row.model}, {row.limit // 1024}k | {row.gpus:,} | {row.mode} "
            f"| {row.iteration:,.0f} | {parts} | {row.waiting_share:.0%} "
            f"| {row.tokens_per_s_gpu:,.0f} | {efficiency(row, rows):.0%} |"
        )
    return lines


def sync_table(few: dict[str, dict[str, float]], many: dict[str, dict[str, float]]) -> list[str]:
    """Markdown: seconds to 8 replicas and to 64, by transport."""
    lines = [
        f"| seconds of a push to {REPLICAS} replicas; 64 | {' | '.join(SYNCED)} |",
        f"|{'---|' * (1 + len(SYNCED))}",
    ]
    for name in TRANSPORTS:
        cells = (f"{few[model][name]:,.3g}; {many[model][name]:,.3g}" for model in SYNCED)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def check_table(checks: Sequence[Check]) -> list[str]:
    """Markdown."""
    lines = [
        "| figure | of | theirs | simulated | ratio | reproduced |",
        "|---|---|---|---|---|---|",
    ]
    for check in checks:
        verdict = ("yes" if check.reproduced else "no") + (f": {check.note}" if check.note else "")
        lines.append(
            f"| {check.what} | {check.source} | {check.theirs:.3g} {check.unit} "
            f"| {check.ours:.3g} {check.unit} | {check.ratio:.2g} | {verdict} |"
        )
    return lines


def summary(c: Constants, rows: Sequence[Row], checks: Sequence[Check]) -> dict[str, Any]:
    """The last line."""
    asynchronous, chained = (pick(rows, "8B", 64, m.name) for m in (ASYNC, ASYNC_SHARED))
    found = result_of("scaling-lengths-cpu")
    return {
        "async_over_sync_8B_64": asynchronous.tokens_per_s_gpu
        / pick(rows, "8B", 64, SYNC.name).tokens_per_s_gpu,
        "shared_over_own_groups_8B_64": chained.tokens_per_s_gpu / asynchronous.tokens_per_s_gpu,
        "typical_factor": typical_factor(list(checks)),
        "reproduced": sum(check.reproduced for check in checks),
        "checked": len(checks),
        "lengths": {
            key: found[key] for key in ("model", "task", "log_deviation", "same_prompt", "at_limit")
        },
        "runs": [record(row, rows) for row in rows],
        "syncs": {str(count): syncs(c, count) for count in (1, REPLICAS, 64)},
        "checks": [check.record() for check in checks],
        "constants": table_of(c),
    }
