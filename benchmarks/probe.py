"""How often does the probe after a sync raise a false alarm?

    python -m benchmarks.probe [--save]

In bfloat16 an engine and a trainer with the same weights differ by little on most tokens and by
much on a few. Here such gaps are drawn from distributions that fit published measurements, and the
probe of :mod:`lightning_rl.learn.probe` judges them: 4 prompts of 2 tokens, then, after a token
above 0.25 nats, 16 tokens of each. The table says how many runs of 1,000 syncs an end at the first
such token would stop, and what the second probe leaves of that. The last line is JSON. ``--save``
also writes the table of docs/sync.md. Takes about a minute.

Published, of Qwen2.5-0.5B-Instruct, 3,916 tokens sampled by vLLM at temperature 1: 95% of gaps at
most 0.113 nats, the largest 0.477, 7.5% of ratios outside 0.9-1.1; for two passes of the trainer
alone that differ in how many rows share one, 0.117, 0.656 and 8.0% (huggingface/trl#6789, comment
of 2026-09-17). Student's t with 4.5 (3.6) degrees of freedom and a scale of 0.0426 (0.0401) has
these 95% and largest gaps, and 7.1% (7.5%) of ratios outside. 6.9% of 2,048
of Qwen2.5-1.5B-Instruct are outside (huggingface/trl#7269).
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.results import report, write_block
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.learn.probe import AGAIN_TOKENS, ONE_PROMPT, OUTLIER

PAGE = Path(__file__).parents[1] / "docs" / "sync.md"
BOUND = logprob_tolerance("bfloat16")
PROMPTS, TOKENS = 4, 2
"""The size of a first probe."""
SYNCS = 1_000
"""The syncs of a run."""
ROUNDS, FIRST, SECOND = 10, 200_000, 25
"""Syncs that are drawn in each of so many rounds, and second probes for each that needs one."""


@dataclass(frozen=True)
class Gaps:
    """Student's t, times what the tokens of one prompt share: a log-normal factor of mean square 1.

    ``spread`` is the standard deviation of that factor's logarithm: some prompts are harder.
    """

    name: str
    freedom: float
    scale: float
    spread: float = 0.0

    def prompts(self, syncs: int, random: np.random.Generator) -> np.ndarray:
        """Draw the scale of each prompt's gaps, shape (syncs, PROMPTS), in nats."""
        logs = random.standard_normal((syncs, PROMPTS), dtype=np.float32)
        return self.scale * np.exp(self.spread * logs - self.spread**2)

    def draw(self, scale: np.ndarray, tokens: int, random: np.random.Generator) -> np.ndarray:
        """Draw gaps in nats, shape (syncs, PROMPTS, tokens)."""
        draws = random.standard_t(self.freedom, (*scale.shape, tokens))
        return np.abs(draws) * scale[..., None]


GOOD = (
    Gaps("vLLM and a bf16 trainer (trl#6789)", 4.544, 0.0426),
    Gaps("the same, some prompts harder", 4.544, 0.0426, 0.3),
    Gaps("two passes of a trainer (trl#6789)", 3.561, 0.0401),
    Gaps("twice the first, some prompts harder", 4.544, 0.0852, 0.3),
)


def alarms(gaps: np.ndarray) -> np.ndarray:
    """Return which second probes fail, shape (syncs,), as ``require_agreement`` judges them."""
    counted = np.minimum(gaps, OUTLIER * BOUND)
    worst = counted.mean(2).max(1)
    return (counted.mean((1, 2)) > BOUND) | (worst > ONE_PROMPT * BOUND)


def simulate(gaps: Gaps, rounds: int, first: int, second: int) -> dict[str, Any]:
    """Return shares of syncs: ``asked`` again, and ``alarms``, ``below`` which they are (95%)."""
    random = np.random.default_rng(0)
    asked, found, largest = 0, 0, 0.0
    for _ in range(rounds):
        scale = gaps.prompts(first, random)
        again = scale[gaps.draw(scale, TOKENS, random).max((1, 2)) > BOUND]
        asked += len(again)
        for _ in range(second):
            drawn = gaps.draw(again, AGAIN_TOKENS, random)
            found += int(alarms(drawn).sum())
            largest = max(largest, float(np.minimum(drawn, OUTLIER * BOUND).mean((1, 2)).max()))
    syncs = rounds * first * second
    # None in n: 3 / n, with 95% confidence (the rule of three); of a few, about so much more.
    below = (found + 3 + 2 * found**0.5) / syncs
    share = asked / rounds / first
    return {
        "gaps": gaps.name,
        "asked": share,
        "largest_mean": largest,
        "alarms": found / syncs,
        "below": below,
        "run_once": 1 - (1 - share) ** SYNCS,
        "run_below": SYNCS * below,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Format a line per distribution for a page."""
    return [
        "| gaps of good bfloat16 tokens | syncs with a second probe | largest mean of one (bound "
        f"{BOUND:g}) | runs of {SYNCS:,} syncs that one token would end | that the probe ends |",
        "|---|---|---|---|---|",
        *(
            f"| {row['gaps']} | {row['asked']:.1%} | {row['largest_mean']:.2f} | "
            f"{row['run_once']:.0%} | < {row['run_below']:.0e} |"
            for row in rows
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--save", action="store_true", help="write results and docs/sync.md")
    arguments = parser.parse_args()
    rows = [simulate(gaps, ROUNDS, FIRST, SECOND) for gaps in GOOD]
    print("\n".join(table(rows)))
    if arguments.save:
        write_block(PAGE, "probe", table(rows))
    report("probe", {"bound": BOUND, "syncs": SYNCS, "rows": rows}, arguments.save)


if __name__ == "__main__":
    main()
