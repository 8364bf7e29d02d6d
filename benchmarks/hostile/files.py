"""Hostile calls: damaged files that ``view`` and ``rollouts`` are given."""

from benchmarks.hostile.call import Call, command

CALLS: list[Call] = [
    Call(
        "rollouts of a file that is not there",
        command("rollouts", "missing.jsonl"),
        ("missing.jsonl",),
    ),
]
