"""Format what ``benchmarks.schedulers`` writes into docs/collectors.md."""

from typing import Any

from benchmarks.schedulers.simulated import Row, speed


def table(rows: list[Row], load: tuple[str, float]) -> list[str]:
    """Return Markdown of one load: lengths and share of training; speed relative to Sync."""
    lines = [
        "| scheduler | speed | engine bubble | trainer idle | wasted | staleness mean / max |",
        "|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if (row.lengths, row.train_share) == load):
        lines.append(
            f"| {row.scheduler} | {speed(row, rows):.2f} "
            f"| {row.engine_bubble:.0%} | {row.trainer_idle:.0%} | {row.wasted:.0%} "
            f"| {row.staleness_mean:.2f} / {row.staleness_max} |"
        )
    return lines


def real_table(result: dict[str, Any]) -> list[str]:
    """Return Markdown of what `real.measured` returns."""
    seconds, accuracy = result["seconds_per_iteration"], result["accuracy_after"]
    names = {"sync": "`SyncCollector`", "one_step_off": "`OneStepOffCollector`"}
    names["async"] = f"`AsyncCollector`, {result['staleness_bound']}"
    return [
        "| collector | seconds per iteration | speed | held-out accuracy after |",
        "|---|---|---|---|",
        *(
            f"| {label} | {seconds[name]:.2f} | {seconds['sync'] / seconds[name]:.2f} "
            f"| {accuracy[name]:.2f} |"
            for name, label in names.items()
        ),
    ]
