"""Measure what a judge's preference for the first answer does to rankings, and what judges ask.

    python -m benchmarks.rubric [--groups 400] [--prefers 0.5] [--save]

The judge is planted: a server on this machine that knows what each answer is worth, but in so many
of its verdicts prefers whatever stands first. Groups of four answers that are equally good are
ranked in one order, and in both. Their position bias is the mean score of the answers that stand
first (in the first order) over that of those that stand last, with its standard error.

The last line is JSON: ``position_bias``; ``parts``, the mean of each part of a rubric, which is
known here; and ``requests_per_group`` of both judges, groups of 4 unless another size is named.
``--save`` also keeps it in benchmarks/results, and writes the table of docs/rewards.md.
"""

import asyncio
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.support.planted_judge import PlantedJudge, judging
from benchmarks.support.results import parser_of, report_on
from lightning_rl.extend import Criterion, OpenAIJudge
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFunction
from lightning_rl.rewards.ranking import RankingJudge, split
from lightning_rl.rewards.rubric import RubricJudge
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus

PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"
SIZE = 4
WORTH = 5
"""The worth of every ranked answer: none is better than another."""
CRITERIA = [
    Criterion("holds if it has source", weight=2.0, name="source"),
    Criterion("holds if it has step 4 times", most=4, name="steps"),
    Criterion("holds if it has insult", weight=-1.0, name="insult"),
]
COMPLETIONS = [
    "source step step",
    "source step step step step",
    "insult step",
    "step insult source",
]
"""A group of which 3/4 have a source, a half has an insult, and that have 2, 4, 1 and 1 of 4 steps.

The scores are (2 + 2/4)/3, (2 + 4/4)/3, 0 (clipped: (0 + 1/4 - 1)/3), and (2 + 1/4 - 1)/3.
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--prefers", type=float, default=0.5)
    arguments = parser.parse_args()
    with judging(PlantedJudge(prefers_first=arguments.prefers)) as judge:
        result: dict[str, Any] = {
            "position_bias": {
                "one order": position_bias(judge, arguments.groups, both_orders=False),
                "both orders": position_bias(judge, arguments.groups, both_orders=True),
            },
            "parts": parts(judge),
            "requests_per_group": requests(judge),
        }
    report_on(PAGE, "rubric", result, table(result), arguments.save)


def table(result: dict[str, Any]) -> list[str]:
    """Return a row per way to rank: the position bias, and the requests for a group."""
    lines = ["| | first over last | requests per group |", "|---|---|---|"]
    for way, bias in result["position_bias"].items():
        asked = result["requests_per_group"][f"ranking, {way}"]
        lines.append(f"| {way} | {bias['mean']:.3f} ± {bias['standard_error']:.3f} | {asked:.0f} |")
    return lines


def position_bias(judge: PlantedJudge, groups: int, both_orders: bool) -> dict[str, float]:
    """Return how much more the answers that stand first get than those that stand last."""
    ranked = [
        [f"group {group}, answer {i}: {WORTH}" for i in range(SIZE)] for group in range(groups)
    ]
    scores = graded(ranking(judge, both_orders), ranked)
    differences = []
    for number, texts in enumerate(ranked):
        ((first, *_, last),) = split(texts, SIZE, str(number))
        differences.append(scores[texts_id(number, first)] - scores[texts_id(number, last)])
    error = stdev(differences) / len(differences) ** 0.5
    return {"mean": fmean(differences), "standard_error": error}


def texts_id(group: int, text: str) -> tuple[str, str]:
    """Return the key of a completion: its group's id, and its text."""
    return str(group), text


def parts(judge: PlantedJudge) -> dict[str, float]:
    """Return the mean of each part of a rubric over a group, and of the score."""
    rewards = Rewards([rubric(judge, together=True)])
    group = rollouts(0, COMPLETIONS)
    asyncio.run(rewards.grade([group]))
    names = group[0].reward_parts
    return {name: fmean(r.reward_parts[name] or 0.0 for r in group) for name in names}


def requests(judge: PlantedJudge) -> dict[str, float]:
    """Return the number of requests for a group."""
    many = [f"answer {i}: {i}" for i in range(16)]
    asked = {
        "ranking, one order": (ranking(judge, False), many[:SIZE]),
        "ranking, both orders": (ranking(judge, True), many[:SIZE]),
        "ranking of 16, one order": (ranking(judge, False), many),
        "rubric, together": (rubric(judge, together=True), COMPLETIONS),
        "rubric, one by one": (rubric(judge, together=False), COMPLETIONS),
    }
    found = {}
    for name, (function, texts) in asked.items():
        before = len(judge.bodies)
        graded(function, [texts])
        found[name] = float(len(judge.bodies) - before)
    return found


def ranking(judge: PlantedJudge, both_orders: bool) -> Any:
    return RankingJudge(OpenAIJudge(judge.url, "planted"), both_orders=both_orders)


def rubric(judge: PlantedJudge, together: bool) -> Any:
    return RubricJudge(OpenAIJudge(judge.url, "planted"), CRITERIA, together=together)


def graded(function: RewardFunction, groups: list[list[str]]) -> dict[tuple[str, str], float]:
    """Return the reward of each completion, by :func:`texts_id`."""
    made = [rollouts(number, texts) for number, texts in enumerate(groups)]
    rewards = Rewards([function])
    asyncio.run(rewards.grade(made))
    flat = [rollout for group in made for rollout in group]
    rewards.require_graded(flat)
    return {(r.group_id, str(r.completion)): float(r.reward or 0.0) for r in flat}


def rollouts(number: int, texts: list[str]) -> list[Rollout]:
    """Make a group of one completed rollout each."""
    prompt = Prompt("p", "Answer.", [1])
    return [
        Rollout(prompt, str(number), i, 0, completion=text, status=RolloutStatus.COMPLETED)
        for i, text in enumerate(texts)
    ]


if __name__ == "__main__":
    main()
