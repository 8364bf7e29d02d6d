"""How long are rollouts, and how alike those of one prompt? Measured for `scaling_simulated`.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling_lengths --model DIRECTORY [--save]

A pretrained chat model answers word problems of reasoning-gym (`gsm_symbolic`) at temperature 1, by
`TransformersEngine`, several times each. A lognormal is fitted to how many tokens it writes;
rollouts that reach the limit count as longer than it. The last line is JSON.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.support.results import parser_of, report
from lightning_rl import ReasoningGymPrompts, Rewards, Sampling, SingleTurn, TransformersEngine
from lightning_rl.extend import RolloutPipeline, save_skeleton

TASK = "gsm_symbolic"


def measure(model: str, prompts: int, group_size: int, limit: int) -> list[list[int]]:
    """Tokens of each rollout, by prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = ReasoningGymPrompts(TASK, size=prompts)
    questions.load(tokenizer)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    engine = TransformersEngine(dtype="float32")
    with tempfile.TemporaryDirectory() as directory:
        save_skeleton(model, directory)
        engine.start(Path(directory))
    engine.load_weights(weights.items(), 0)
    rewards = Rewards([lambda completions: [0.0] * len(completions)])
    pipeline = RolloutPipeline(engine, SingleTurn(), rewards, tokenizer)
    sampling = Sampling(max_tokens=limit)
    rollouts = pipeline.run(questions.draw(prompts), group_size, sampling=sampling, iteration=0)
    engine.close()
    groups: dict[str, list[int]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(len(rollout.token_ids))
    return list(groups.values())


def fit(lengths: Sequence[int], limit: int, rounds: int = 200) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm; those at the limit are known to be longer.

    Expectation maximisation for a normal distribution cut off above (Wolynetz 1979, AS 138): a
    value beyond z standard deviations is z's inverse Mills ratio above the mean, on average.
    """
    known = [math.log(length) for length in lengths if length < limit]
    beyond = len(lengths) - len(known)
    mean, deviation = fmean(known), 1.0
    plain, squared = sum(known), sum(x * x for x in known)
    for _ in range(rounds):
        z = (math.log(limit) - mean) / deviation
        mills = math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / (0.5 * math.erfc(z / math.sqrt(2)))
        first = mean + deviation * mills
        second = deviation**2 * (1 + z * mills - mills**2)
        mean = (plain + beyond * first) / len(lengths)
        square = (squared + beyond * (second + first**2)) / len(lengths)
        deviation = math.sqrt(square - mean**2)
    return mean, deviation


def same_prompt(groups: Sequence[Sequence[int]]) -> float:
    """Share of the logarithm's variance that lies between prompts: the intraclass correlation.

    From the mean squares between and within groups of equal size (Shrout & Fleiss 1979, ICC(1,1)).
    """
    logs = [[math.log(length) for length in group] for group in groups]
    size, means = len(logs[0]), [fmean(group) for group in logs]
    middle = fmean(means)
    between = size * sum((mean - middle) ** 2 for mean in means) / (len(logs) - 1)
    within = sum((x - m) ** 2 for group, m in zip(logs, means, strict=True) for x in group)
    within /= len(logs) * (size - 1)
    return max(0.0, (between - within) / (between + (size - 1) * within))


def summary(groups: Sequence[Sequence[int]], limit: int) -> dict[str, Any]:
    """What the simulation takes, and what it was fitted to."""
    every = sorted(length for group in groups for length in group)
    mean, deviation = fit(every, limit)
    quantile = {f"p{q}": every[min(len(every) - 1, len(every) * q // 100)] for q in (10, 50, 90)}
    return {
        "log_mean": mean,
        "log_deviation": deviation,
        "same_prompt": same_prompt(groups),
        "limit": limit,
        "at_limit": sum(length >= limit for length in every) / len(every),
        "tokens_mean": fmean(every),
        **quantile,
        "lengths": [list(group) for group in groups],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="directory of a chat model")
    parser.add_argument("--name", help="what the record calls it; else the directory's name")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=6)
    parser.add_argument("--limit", type=int, default=512)
    given = parser.parse_args()
    groups = measure(given.model, given.prompts, given.group_size, given.limit)
    found = {"model": given.name or Path(given.model).name, "task": TASK}
    report("scaling-lengths", found | summary(groups, given.limit), given.save)


if __name__ == "__main__":
    main()
