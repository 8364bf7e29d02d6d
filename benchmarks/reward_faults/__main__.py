"""Show what bad rewards do to a run: each one in the real pool, between good ones.

    python -m benchmarks.reward_faults [--timeout_s 1] [--save]

Every fault is graded as the second of three completions by one and the same pool, so whatever a
fault leaves behind meets those that follow. Prints a Markdown table; the last line is JSON.
``--save`` writes the table into docs/api/faults.md.
"""

import argparse
import asyncio
import json
import re
import time
from pathlib import Path

from benchmarks.reward_faults.rewards import FAULTS, LINGERS, faulty
from benchmarks.support.results import write_block
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus

PAGE = Path(__file__).parents[2] / "docs" / "api" / "faults.md"


def group_of(completions: list[str]) -> list[Rollout]:
    """Make one completed rollout each."""
    prompt = Prompt("p", "", [1])
    return [
        Rollout(prompt, "g", i, 0, completion=text, status=RolloutStatus.COMPLETED)
        for i, text in enumerate(completions)
    ]


def left_behind() -> set[str]:
    """Return ids of workers, of what was forked from them, and of programs that a fault started."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if words[:2] == [b"sleep", LINGERS.encode()] or b"pool_worker" in b"".join(words):
            found.add(process.name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.reward_faults",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--timeout_s", type=float, default=1.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    before = left_behind()
    pool = Isolated(faulty, 1, options.timeout_s, memory_mb=256)
    rewards = Rewards([pool])  # type: ignore[list-item]  # async, as reward functions may be
    table = ["| the reward ... | that completion | neighbours | seconds |", "|---|---|---|---|"]

    async def grade_all() -> dict[str, int | float]:
        await rewards.grade([group_of(["good"])])  # the worker starts
        good = failed = 0
        print("\n".join(table))
        for fault in FAULTS:
            group = group_of(["good", fault.__name__, "good"])
            begin = time.perf_counter()
            await rewards.grade([group])
            seconds = time.perf_counter() - begin
            first, bad, last = group
            good += (first.reward == 1.0) + (last.reward == 1.0)
            failed += bad.status is RolloutStatus.FAILED
            what = (bad.error or f"reward {bad.reward}").removeprefix("reward faulty: ")
            what = re.sub(r": '/.*'$", "", what)  # paths of this machine
            outcome = f"{bad.status.value}: {what}" if bad.error else what
            table.append(
                f"| {fault.__doc__} | {outcome} | {first.reward}, {last.reward} | {seconds:.2f} |"
            )
            print(table[-1])
        group = group_of(["good"] * 500)
        begin = time.perf_counter()
        await rewards.grade([group])
        milliseconds = (time.perf_counter() - begin) * 2
        return {
            "faults": len(FAULTS),
            "failed": failed,
            "neighbours": 2 * len(FAULTS),
            "neighbours_graded": good,
            "ms_per_completion": round(milliseconds, 2),
        }

    result = asyncio.run(grade_all())
    rewards.close()
    result["left_behind"] = len(left_behind() - before)
    if options.save:
        write_block(PAGE, "reward-faults", table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
