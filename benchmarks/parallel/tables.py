"""Format what ``benchmarks.parallel`` writes into docs/distributed.md."""

from typing import Any

NAMES = {
    "sequence": "`sequence: n`",
    "tensor": "`tensor: 2`",
    "both": "`sequence: 2, tensor: 2`",
    "expert": "`expert: n`",
    "pairs": "`expert: 2` of four",
    "mixed": "`sequence: n, expert: 2`",
}


def table(result: dict[str, Any]) -> list[str]:
    """List each layout's largest differences over all models, processes and features."""
    lines = [
        "| Layout | Compared | Differences, float64 | float32 | Kept, plan off by "
        "| At most, plan off by |",
        "|---|---|---|---|---|---|",
    ]
    for layout, name in NAMES.items():
        off, plan = (_of_layout(layout, result[key]) for key in ("differences", "plan_errors"))
        half = {key for key in off if key.endswith("float32")}
        most = max(value for key, value in off.items() if key not in half)
        rounded = max(off[key] for key in half)
        kept, peak = (
            max(value for key, value in plan.items() if key.endswith(what))
            for what in ("kept", "peak")
        )
        lines.append(
            f"| {name} | {len(off)} | {most:.1e} | {rounded:.1e} | {kept:.1%} | {peak:.1%} |"
        )
    return lines


def _of_layout(layout: str, values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if key.split("/")[2] == layout}
