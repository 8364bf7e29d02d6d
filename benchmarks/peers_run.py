"""What both sides of `benchmarks/peers.py` take, measure and print. Imports torch, nothing else."""

import argparse
import json
import resource
import time

import torch


class Progress:
    """CPU and wall seconds of each iteration, with its mean reward and number of tokens."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.setup_cpu_s = 0.0

    def begin(self) -> None:
        """All before this is set-up."""
        self.setup_cpu_s = time.process_time()
        self._since = time.process_time(), time.perf_counter()

    def collected(self, rewards: list[float], tokens: int) -> None:
        self.rewards.append(sum(rewards) / len(rewards))
        self.tokens.append(tokens)

    def finished(self) -> bool:
        """An iteration is over; whether the mean reward of the last three reaches the goal."""
        now = time.process_time(), time.perf_counter()
        self.cpu_s.append(now[0] - self._since[0])
        self.wall_s.append(now[1] - self._since[1])
        self._since = now
        return len(self.rewards) >= 3 and sum(self.rewards[-3:]) / 3 >= self.goal

    def report(self) -> None:
        """The last line, JSON."""
        kept = ("cpu_s", "wall_s", "rewards", "tokens", "setup_cpu_s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({key: getattr(self, key) for key in kept} | {"peak_rss_bytes": peak}))


def parse_arguments(description: str) -> argparse.Namespace:
    """One task, for one side; sets torch's threads."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("--model", "--prompts", "--out", "--generation"):
        parser.add_argument(name, required=True)
    for name in ("--iterations", "--seed", "--threads", "--micro-batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--goal", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments
