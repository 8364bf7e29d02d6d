"""Signs of reward hacking, for ``LearningAlarms``."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from typing import Any

from lightning_rl.callbacks.samples import FirstAndLast, Sample, Scores, Stateful
from lightning_rl.collect.tasks import Task
from lightning_rl.rewards.teachers import Teacher
from lightning_rl.rollout import Rollout

ADVICE = (
    "The policy may be gaming its reward: read some rollouts, and lower the weight "
    "of parts that are easy to get, such as a format, or grant them only for right answers"
)

SATED = 0.9
"""Share of the range of a part's scores above which it has little more to pay."""


class Part(Scores):
    """The scores in one part of the reward."""

    state_names = ("first", "last", "seen", "range", "peak")

    def __init__(self, window: int, least: int) -> None:
        super().__init__(window, least)
        self.seen = 0
        """Number of iterations that had scores."""
        self.peak: list[Any] = []
        """Mean, spread and count where the mean was highest; the mean reward of that time."""

    @property
    def spread(self) -> float:
        """How far the best score of a rollout is above the worst."""
        return self.range[1] - self.range[0]

    def height(self, sample: Sample) -> float:
        """Return how far the mean of a sample is above the lowest score."""
        return sample.mean - self.range[0]


class RewardHacking(Stateful):
    """Compares the parts of a reward, and held-out accuracy, with the mean reward.

    Args:
        rewards: mean rewards of the first groups and of the last, which its owner keeps.
        reward_sigmas: number of standard errors by which a part has to fall; more in a long run,
            as its peak is then the highest of many.
        eval_sigmas: number of standard errors by which accuracy has to fall.
    """

    def __init__(self, rewards: FirstAndLast, reward_sigmas: float, eval_sigmas: float) -> None:
        self.rewards, self.reward_sigmas, self.eval_sigmas = rewards, reward_sigmas, eval_sigmas
        self.parts: dict[str, Part] = {}
        self.best: dict[str, float] = {}
        """The highest held-out accuracy, and the mean reward of the iterations before it."""

    def _part(self, name: str) -> Part:
        new = Part(self.rewards.window, self.rewards.least)
        return self.parts.setdefault(name, new)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add the scores of an iteration's rollouts."""
        scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for rollout in rollouts:
            for name, score in rollout.reward_parts.items():
                if score is not None:
                    scores[component(rollout.prompt.set, name)][rollout.group_id].append(score)
        for name, groups in scores.items():
            part = self._part(name)
            part.add_groups(groups.values())
            part.seen += 1
            if part.full and self.rewards.full:
                for sample, reward in zip(part.both, self.rewards.both, strict=True):
                    if not part.peak or sample.mean > part.peak[0]:
                        part.peak = [*astuple(sample), reward.mean]

    def part_fell(self, weights: Mapping[str, float]) -> str | None:
        """Return a warning if an important part is below its peak although the mean reward is not
        below what it was there; else None.

        Important are the part whose weight times range is the largest in the task's ``weights``,
        and parts of weight 0, which exist to be watched. So is any other part that lost more than
        half, once a part pays nearly all that it can: then it is no trade for something to learn.
        """
        parts = {name: part for name, part in self.parts.items() if name in weights}
        if len(weights) < 2 or not self.rewards.full:
            return None
        largest = max((weights[name] * part.spread for name, part in parts.items()), default=0.0)
        sated = any(
            weights[name] > 0 and part.full and part.height(part.both[1]) >= SATED * part.spread > 0
            for name, part in parts.items()
        )
        now = self.rewards.both[1].mean
        for name, part in parts.items():
            if not part.peak or now < part.peak[-1]:
                continue
            *values, earlier = part.peak
            peak, last, weight = Sample(*values), part.both[1], weights[name]
            matters = weight == 0 or 0 < weight * part.spread == largest
            lost = weight > 0 and part.height(last) < part.height(peak) / 2
            if (matters or (lost and sated)) and last.mean < peak.lowest(last, self._sigmas(part)):
                return (
                    f"the reward {name} went from {peak.mean:.3g} to {last.mean:.3g}, while the "
                    f"mean of all rewards went from {earlier:.3g} to {now:.3g}. {ADVICE}"
                )
        return None

    def _sigmas(self, part: Part) -> float:
        """Return the number of standard errors below its peak that chance explains.

        The peak is the highest of n windows, and each is compared with those before it. Of n^2
        comparisons one is above sqrt(s^2 + 2 log n^2) by chance about as often as a single one is
        above s, since the tail of a normal distribution falls as exp(-s^2 / 2).
        """
        windows = max(1.0, part.seen / len(part.first) - 1)
        return math.sqrt(self.reward_sigmas**2 + 4 * math.log(windows))

    def accuracy_fell(self, now: Sample) -> str | None:
        """Return a warning if held-out accuracy fell although the reward rose; else None."""
        present = self.rewards.last or self.rewards.first
        if not self.best or now.mean >= self.best["accuracy"]:
            self.best = {"accuracy": now.mean}
            if present:
                self.best["reward"] = Sample.of(list(chain(*present))).mean
            return None
        if not self.rewards.full:
            return None
        first, last = (sample.mean for sample in self.rewards.both)
        earlier = self.best.get("reward", first)
        highest = Sample.of_share(self.best["accuracy"], now.count)
        if last <= earlier or now.mean >= highest.lowest(now, self.eval_sigmas):
            return None
        return (
            f"eval/accuracy of {now.count} prompts fell from {highest.mean:.3g} to {now.mean:.3g}, "
            f"while the mean reward rose from {earlier:.3g} to {last:.3g}. {ADVICE}"
        )

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"best": self.best, "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        for name, kept in state_dict["parts"].items():
            self._part(name).load_state_dict(kept)


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
