"""Format what `benchmarks/wall` writes into docs/benchmarks.md and the README."""

from collections.abc import Mapping
from typing import Any

FRONT = {
    "quickstart": "sort_digits, 1.6M parameters",
    "longer": "completions of nearly equal length",
    "heavy": "completions of very different lengths",
    "long": "prompts of 512 tokens",
    "large": "27M parameters",
}
"""The tasks on the front page."""
NAMES = {"transformers": "TransformersEngine", "vllm": "vLLM"}
"""The ways to generate that have another name on the front page."""


def table(by_task: Mapping[str, dict[str, Any]]) -> list[str]:
    """List both sides' best layouts and the ratios for all tasks."""
    lines = [
        "| task | ours, wall s per iteration | TRL | TRL / ours | ours, one thread / best "
        "| ours, best / floor |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in by_task.items():
        sides = [f"{seconds:.3g} ({best})" for best, seconds in bests(result)]
        ratios = [f"{result[key]:.2f}" for key in ("ratio", "two_over_one", "floor_ratio")]
        lines.append(f"| {' | '.join([name, *sides, *ratios])} |")
    return lines


def front_table(by_task: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the README's table: tasks and layouts in words."""
    lines = ["| task | lightning_rl | TRL 1.16 | ratio |", "|---|---|---|---|"]
    for task, result in by_task.items():
        if task not in FRONT:
            continue
        sides = [f"{seconds:.3g} ({in_words(best)})" for best, seconds in bests(result)]
        lines.append(f"| {FRONT[task]} | {' | '.join(sides)} | {result['ratio']:.3g} |")
    return lines


def bests(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return each side's fastest layout, with its wall seconds per iteration."""
    found = []
    for side in ("ours", "trl"):
        best = result[side]["best"]
        found.append((best, result[side]["layouts"][best]["wall_s_per_iteration"]))
    return found


def in_words(layout: str) -> str:
    """Return a layout's name, without how many groups are streamed."""
    generation, comma, shape = layout.partition(" by ")[0].partition(",")
    return NAMES.get(generation, generation) + comma + shape
