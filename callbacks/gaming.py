"""Signs that a policy games its reward, for ``LearningAlarms``."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from typing import Any

from lightning_rl.callbacks.samples import FirstAndLast, Sample
from lightning_rl.collect.tasks import Task
from lightning_rl.rewards.teachers import Teacher
from lightning_rl.rollout import Rollout

ADVICE = (
    "The policy may be gaming its reward: read some rollouts, and lower the weight "
    "of parts that are easy to get, such as a format, or grant them only for right answers"
)

SATED = 0.9
"""Share of the range of a part's scores above which it has little more to pay."""


class Gaming:
    """Compares the parts of a reward, and held-out accuracy, with the mean reward.

    Args:
        rewards: mean rewards of the first groups and of the last, which its owner keeps.
        reward_sigmas: number of standard errors by which a part has to fall; more in a long run,
            as its peak is then the highest of many.
        eval_sigmas: number of standard errors by which accuracy has to fall.
    """

    def __init__(self, rewards: FirstAndLast, reward_sigmas: float, eval_sigmas: float) -> None:
        self.rewards, self.reward_sigmas, self.eval_sigmas = rewards, reward_sigmas, eval_sigmas
        self.parts: dict[str, FirstAndLast] = {}
        """Mean scores of groups in each part of the reward."""
        self.ranges: dict[str, list[float]] = {}
        """The lowest and the highest score of a rollout in each part."""
        self.peaks: dict[str, tuple[Sample, Sample]] = {}
        """Each part where it was highest, and the reward of the same iterations."""
        self.iterations: dict[str, int] = defaultdict(int)
        """How many iterations had scores in each part."""
        self.best: dict[str, float] = {}
        """The highest held-out accuracy, and the mean reward of the iterations before it."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add the scores of an iteration's rollouts."""
        scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for rollout in rollouts:
            for name, score in rollout.reward_parts.items():
                if score is not None:
                    scores[component(rollout.prompt.set, name)][rollout.group_id].append(score)
        for name, groups in scores.items():
            ends = self.parts.setdefault(
                name, FirstAndLast(self.rewards.window, self.rewards.least)
            )
            ends.add([sum(group) / len(group) for group in groups.values()])
            seen = [*chain(*groups.values()), *self.ranges.get(name, [])]
            self.ranges[name] = [min(seen), max(seen)]
            self.iterations[name] += 1
            if ends.full and self.rewards.full:
                before, now = zip(ends.both, self.rewards.both, strict=True)
                peak = self.peaks.setdefault(name, before)
                self.peaks[name] = max(peak, now, key=lambda both: both[0].mean)

    def part_fell(self, weights: Mapping[str, float]) -> str | None:
        """Return a warning if an important part is below its peak although the mean reward is not
        below what it was there; else None.

        Important are the part whose weight times range is the largest in the task's ``weights``,
        and parts of weight 0, which exist to be watched. So is any other part that lost more than
        half, once a part pays nearly all that it can: then it is no trade for something to learn.
        """
        if len(weights) < 2:
            return None
        ranges = {name: high - low for name, (low, high) in self.ranges.items()}
        pays = {name: weight * ranges.get(name, 0.0) for name, weight in weights.items()}
        _, now = self.rewards.both
        for name, (peak, earlier) in self.peaks.items():
            if name not in weights or now.mean < earlier.mean:
                continue
            _, last = self.parts[name].both
            matters = weights[name] == 0 or 0 < pays[name] == max(pays.values())
            lost = weights[name] > 0 and self._height(name, last) < self._height(name, peak) / 2
            matters = matters or (lost and self._sated(weights))
            if matters and last.mean < peak.lowest(last, self._sigmas(name)):
                return (
                    f"the reward {name} went from {peak.mean:.3g} to {last.mean:.3g}, while the "
                    f"mean of all rewards went from {earlier.mean:.3g} to {now.mean:.3g}. {ADVICE}"
                )
        return None

    def _sigmas(self, name: str) -> float:
        """Return the number of standard errors below its peak that chance explains.

        The peak is the highest of n windows, and each is compared with those before it. Of n^2
        comparisons one is above sqrt(s^2 + 2 log n^2) by chance about as often as a single one is
        above s, since the tail of a normal distribution falls as exp(-s^2 / 2).
        """
        windows = max(1.0, self.iterations[name] / len(self.parts[name].first) - 1)
        return math.sqrt(self.reward_sigmas**2 + 4 * math.log(windows))

    def _height(self, name: str, sample: Sample) -> float:
        """Return how far the mean of a part is above its lowest score."""
        return sample.mean - self.ranges[name][0]

    def _sated(self, weights: Mapping[str, float]) -> bool:
        """Return True if some part with a weight pays nearly all that it can."""
        seen = {name: self.ranges[name] for name in weights if name in self.ranges}
        return any(
            self._height(name, self.parts[name].both[1]) >= SATED * (high - low) > 0
            for name, (low, high) in seen.items()
            if weights[name] > 0 and self.parts[name].full
        )

    def accuracy_fell(self, accuracy: float, prompts: int) -> str | None:
        """Return a warning if held-out accuracy fell although the reward rose; else None."""
        present = self.rewards.last or self.rewards.first
        if not self.best or accuracy >= self.best["accuracy"]:
            self.best = {"accuracy": accuracy}
            if present:
                self.best["reward"] = Sample.of(list(chain(*present))).mean
            return None
        if not self.rewards.full:
            return None
        first, last = (sample.mean for sample in self.rewards.both)
        earlier = self.best.get("reward", first)
        highest, now = (
            Sample.of_share(share, prompts) for share in (self.best["accuracy"], accuracy)
        )
        if last <= earlier or now.mean >= highest.lowest(now, self.eval_sigmas):
            return None
        return (
            f"eval/accuracy of {prompts} prompts fell from {highest.mean:.3g} to {now.mean:.3g}, "
            f"while the mean reward rose from {earlier:.3g} to {last:.3g}. {ADVICE}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as primitives."""
        parts = {name: ends.state_dict() for name, ends in self.parts.items()}
        peaks = {name: [astuple(one) for one in both] for name, both in self.peaks.items()}
        return {
            "parts": parts,
            "ranges": self.ranges,
            "peaks": peaks,
            "iterations": dict(self.iterations),
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.parts = {}
        for name, ends in state["parts"].items():
            self.parts[name] = FirstAndLast(self.rewards.window, self.rewards.least)
            self.parts[name].load_state_dict(ends)
        self.peaks = {
            name: (Sample(*part), Sample(*reward))
            for name, (part, reward) in state["peaks"].items()
        }
        self.iterations = defaultdict(int, state["iterations"])
        self.ranges, self.best = state["ranges"], state["best"]


def component(prompt_set: str, reward: str) -> str:
    """Return the name of a part of the reward, with its prompt set if there are several."""
    return f"{prompt_set}/{reward}" if prompt_set else reward


def component_weights(task: Task) -> dict[str, float]:
    """Return the weight of each part in the reward of a task.

    A teacher is none: the policy learns from its logprobs, whatever its score's weight is.
    """
    functions = task.rewards.functions
    return {
        component(task.name, name): weight
        for name, weight in task.rewards.weights.items()
        if not isinstance(functions[name], Teacher)
    }
