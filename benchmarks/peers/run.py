"""Share what both sides of `benchmarks/peers` take and leave. Imports torch, nothing else."""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist


class Progress:
    """Measures CPU and wall seconds of each iteration of this process.

    Beside them are the mean reward, and the numbers of completions and tokens, of all processes.
    """

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.rank = 0
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        self.rewards: list[float] = []
        self.completions: list[int] = []
        self.tokens: list[int] = []
        self.parts: list[dict[str, float]] = []
        self.setup_cpu_s = 0.0

    def begin(self) -> None:
        """Begin to measure: everything before this call is set-up."""
        self.setup_cpu_s = time.process_time()
        if dist.is_initialized():
            self.rank = dist.get_rank()
        self._since = time.process_time(), time.perf_counter()

    def collected(self, rewards: list[float], tokens: int) -> None:
        """Note an iteration; all processes call this, and so agree on when the goal is met."""
        totals = torch.tensor([sum(rewards), len(rewards), tokens], dtype=torch.double)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
        reward, count, tokens_of_all = totals.tolist()
        self.rewards.append(reward / count)
        self.completions.append(int(count))
        self.tokens.append(int(tokens_of_all))

    def finished(self) -> bool:
        """Note an iteration; tell whether the mean reward of the last three reaches the goal."""
        now = time.process_time(), time.perf_counter()
        self.cpu_s.append(now[0] - self._since[0])
        self.wall_s.append(now[1] - self._since[1])
        self._since = now
        return len(self.rewards) >= 3 and sum(self.rewards[-3:]) / 3 >= self.goal

    def report(self, directory: str) -> None:
        """Write a file of each process."""
        kept = ("cpu_s", "wall_s", "rewards", "completions", "tokens", "parts", "setup_cpu_s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        measured = {key: getattr(self, key) for key in kept} | {"peak_rss_bytes": peak}
        (Path(directory) / f"measured_{self.rank}.json").write_text(json.dumps(measured))


def parser_of_run(description: str) -> argparse.ArgumentParser:
    """Make the parser for one run of one side."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("--model", "--prompts", "--out", "--generation"):
        parser.add_argument(name, required=True)
    for name in ("--iterations", "--seed", "--threads", "--micro-batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--goal", type=float, required=True)
    return parser
