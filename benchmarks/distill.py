"""Measure what a student learns from a teacher, beside what rewards alone teach it.

    python -m benchmarks.distill [--seeds 0 1 2] [--save]

The teacher is SmolLM2-135M-Instruct after 40 iterations of GRPO on five tasks (`full-0` of
`benchmarks.small_model`, which is trained if it is not there). The student is the model before
that. It learns by recipes/smollm2/variants/teacher.yaml: it writes 80 answers an iteration, and
takes the forward KL over the teacher's 16 likeliest tokens. Each seed takes about 15 minutes of a
core. Both are examined by vLLM alone (`benchmarks.exam`).

The last line is JSON: the student's accuracy on all five tasks, the mean over seeds; the teacher's;
and the CPU seconds in which the student first answers nine tenths as much as the teacher, over
those of GRPO. Both are read off the mean reward of five iterations in training. CPU seconds are
those of the whole process, so the teacher's passes are counted.
"""

from statistics import fmean
from typing import Any

from benchmarks.small_model.figures import accuracy
from benchmarks.small_model.runs import (
    DATA,
    LR,
    examined,
    measured,
    rewards_and_seconds,
    trained,
)
from benchmarks.support.results import parser_of, report
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import fetch

TEACHER = "full-0"
ITERATIONS = 20
ENOUGH = 0.9
WINDOW = 5


def seconds_to(rewards: list[float], cpu_s: list[float], wanted: float) -> float:
    """Return CPU seconds until the mean reward of five iterations is ``wanted``; inf: it is not."""
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= wanted:
            return sum(cpu_s[:end])
    return float("inf")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    fetch(DATA / "model")
    prepare(DATA)
    teacher = measured(TEACHER)
    wanted = ENOUGH * accuracy(teacher)
    found: dict[str, dict[str, Any]] = {}
    for seed in arguments.seeds:
        name = f"teacher-{seed}"
        directory = trained(name, LR, seed, iterations=ITERATIONS, teacher=TEACHER)
        found[name] = rewards_and_seconds(directory) | examined(name, directory / "hf")
        print(f"{name}: accuracy {accuracy(found[name]):.3f}, the teacher {accuracy(teacher):.3f}")
    by_rewards = seconds_to(teacher["rewards"], teacher["cpu_s"], wanted)
    by_teacher = [seconds_to(one["rewards"], one["cpu_s"], wanted) for one in found.values()]
    result = {
        "student": fmean(accuracy(one) for one in found.values()),
        "teacher": accuracy(teacher),
        "cpu_s_over_grpo": fmean(by_teacher) / by_rewards,
        "cpu_s_grpo": by_rewards,
        "cpu_s": by_teacher,
        "runs": {
            name: {"rewards": one["rewards"], "accuracy": accuracy(one)}
            for name, one in found.items()
        },
    }
    report("distill", result, arguments.save)


if __name__ == "__main__":
    main()
