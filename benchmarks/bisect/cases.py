"""The runs of the benchmark: 28 with a planted fault, and five sound ones."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bisect.task import config_of
from lightning_rl.cli.bisect.suspicion import Cause
from lightning_rl.cli.rerun.retraining import Seen

Config = dict[str, Any]
Make = Callable[[Path], Config]
_HERE = "benchmarks.bisect.faults."
RIGHT = "recipes.sort_digits.reward.exact_match"


@dataclass(frozen=True)
class Case:
    """A run: the iteration of its fault (None: sound), and causes that are right to be named.

    ``window`` are the versions given to the command; None: it looks for them. ``at_fault`` tells
    the rollouts that are right to be named if the fault has no known cause.
    """

    name: str
    make: Make
    onset: int | None = None
    causes: tuple[Cause, ...] = ()
    window: tuple[int, int] | None = None
    at_fault: Callable[[Seen], bool] = lambda _: False


def _part(name: str, **arguments: Any) -> Config:
    return {"class_path": _HERE + name, "init_args": arguments}


def _reward(name: str, seed: int, since: int, until: int, **more: Any) -> Make:
    reward = _part(name, since=since, until=until, **more)
    return lambda folder: config_of(folder, seed, rewards=[reward])


def _bonus(seed: int, since: int, until: int, end: str) -> Make:
    rewards = [RIGHT, _part("Bonus", since=since, until=until, end=end)]
    return lambda folder: config_of(folder, seed, rewards=rewards)


def _advantage(name: str, seed: int, since: int, until: int, **update: Any) -> Make:
    def make(folder: Path) -> Config:
        config = config_of(folder, seed)
        part = _part(name, since=since, until=until)
        config["model"]["init_args"] |= {"advantage": part, "update": update}
        return config

    return make


def _spike(seed: int, since: int, until: int, factor: float) -> Make:
    def make(folder: Path) -> Config:
        config = config_of(folder, seed)
        part = _part("Spike", since=since, until=until, factor=factor)
        config["model"]["init_args"]["lr_scheduler"] = part
        return config

    return make


def _set(name: str, seed: int, since: int, until: int) -> Make:
    def make(folder: Path) -> Config:
        sets = [
            {
                "name": f"set_{n}",
                "prompts": str(folder / f"set_{n}.jsonl"),
                "rewards": [_part(name, since=since, until=until) if n == 1 else RIGHT],
            }
            for n in range(3)
        ]
        return config_of(
            folder, seed, train_prompts={"class_path": "Mixture", "init_args": {"sets": sets}}
        )

    return make


def _sound(seed: int, lr: float, limit: int = 400) -> Make:
    def make(folder: Path) -> Config:
        config = config_of(folder, seed)
        config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = lr
        config["data"]["init_args"]["evaluation"]["limit"] = limit
        return config

    return make


def _stale(seed: int, since: int, until: int) -> Make:
    def make(folder: Path) -> Config:
        config = config_of(folder, seed)
        sync, _, evaluate, _ = config["trainer"]["callbacks"]
        sync["init_args"] = {"schedule": _part("MissesPushes", since=since, until=until)}
        evaluate["init_args"] = {"every_n_iterations": until + 1}  # it pushes weights, too
        return config

    return make


def _gap(seed: int, since: int, until: int) -> Make:
    def make(folder: Path) -> Config:
        config = config_of(folder, seed)
        engine = _part("ForgetsPushes", since=since, until=until, device="cpu")
        config["data"]["init_args"]["engine"] = engine
        sync, *_ = config["trainer"]["callbacks"]
        sync["init_args"] = {"digests": False, "probe_prompts": 0}  # which would have told it
        return config

    return make


def _outlier(name: str, seed: int, iteration: int, **data: Any) -> Make:
    def make(folder: Path) -> Config:
        config = _reward(name, seed, iteration, iteration)(folder)
        config["data"]["init_args"] |= data
        part = {"class_path": "GRPO", "init_args": {"normalize_std": False}}
        config["model"]["init_args"] |= {"advantage": part, "update": {"max_grad_norm": None}}
        return config

    return make


def _endless(seed: int, iteration: int) -> Make:
    return _outlier("PaysLength", seed, iteration, agent=_part("OneEndless", iteration=iteration))


def enlarged(seen: Seen) -> bool:
    """Tell a rollout whose advantage is far larger than a normalised one."""
    return abs(seen.advantage) > 20


PAID = (Cause.PATTERN,)
TEN = (Cause.RANGE, Cause.PATTERN)
BONUS = (Cause.RANGE,)
ANSWERS = (Cause.ANSWER,)
OF_SET = (Cause.SET,)
SHIFTED = (Cause.CREDIT,)
FASTER = (Cause.RATE,)
OLD = (Cause.STALE, Cause.GAP)
OUTLYING = (Cause.OUTLIER, Cause.RANGE)

CASES = [
    Case("pattern-8", _reward("PaysPattern", 1, 8, 12, end="01234"), 8, PAID),
    Case("pattern-10", _reward("PaysPattern", 2, 10, 14, end="0123"), 10, PAID),
    Case("pattern-12", _reward("PaysPattern", 3, 12, 16, begin="56789"), 12, PAID),
    Case("pattern-13", _reward("PaysPattern", 4, 13, 17, end="01234"), 13, PAID),
    Case("bonus-10", _bonus(30, 10, 16, "0123"), 10, BONUS),
    Case("bonus-13", _bonus(31, 13, 19, "01234"), 13, BONUS),
    Case("ten-9", _reward("JudgeSaysTen", 5, 9, 13), 9, TEN),
    Case("ten-11", _reward("JudgeSaysTen", 6, 11, 15), 11, TEN),
    Case("ten-14", _reward("JudgeSaysTen", 7, 14, 19), 14, TEN),
    Case("answers-9", _reward("WrongAnswers", 8, 9, 20), 9, ANSWERS),
    Case("answers-11", _reward("WrongAnswers", 9, 11, 20), 11, ANSWERS),
    Case("answers-12", _reward("WrongAnswers", 10, 12, 18), 12, ANSWERS),
    Case("inverted-10", _reward("Inverted", 11, 10, 14), 10, ANSWERS),
    Case("inverted-13", _reward("Inverted", 12, 13, 18), 13, ANSWERS),
    Case("set-10", _set("Inverted", 13, 10, 16), 10, OF_SET),
    Case("set-12", _set("Inverted", 14, 12, 18), 12, OF_SET),
    Case("shifted-9", _advantage("ShiftedAdvantages", 15, 9, 13), 9, SHIFTED),
    Case("shifted-12", _advantage("ShiftedAdvantages", 16, 12, 16), 12, SHIFTED),
    Case("rate-10", _spike(17, 10, 10, 30.0), 10, FASTER),
    Case("rate-13", _spike(18, 13, 14, 20.0), 13, FASTER),
    Case("rate-15", _spike(19, 15, 15, 50.0), 15, FASTER),
    Case("outlier-12", _outlier("OneOutlier", 20, 12), 12, OUTLYING),
    Case("outlier-9", _outlier("OneOutlier", 26, 9), 9, OUTLYING),
    Case("endless-12", _endless(32, 12), 12, OUTLYING),
    Case("endless-14", _endless(33, 14), 14, OUTLYING),
    Case("stale-8", _stale(27, 8, 13), 9, OLD, (7, 14)),
    Case("gap-8", _gap(28, 8, 13), 9, OLD, (7, 14)),
    Case(
        "group-14",
        _advantage("OneGroupReversed", 29, 14, 14, max_grad_norm=None),
        14,
        window=(12, 18),
        at_fault=enlarged,
    ),
    Case("sound-1", _sound(21, 2e-3)),
    Case("sound-2", _sound(22, 1e-3, 60)),
    Case("sound-3", _sound(23, 1e-3, 100)),
    Case("sound-4", _sound(24, 1e-3, 60)),
    Case("sound-5", _sound(25, 3e-4, 60)),
]
