"""Parts with a planted fault: each is sound, except in iterations ``since`` to ``until``."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_rl.agents.base import SingleTurn
from lightning_rl.algos.advantages import GRPO
from lightning_rl.data.batch import token_rows
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.rewards.log import TrainerState
from lightning_rl.rollout import Rollout
from lightning_rl.sync.schedule import SyncSchedule, SyncState


class _Faulty:
    """Pays the right answer, except in some iterations."""

    def __init__(self, since: int, until: int) -> None:
        self.since, self.until = since, until

    def __call__(
        self,
        completions: Sequence[str],
        answer: Sequence[str],
        prompts: Sequence[str],
        trainer_state: TrainerState,
    ) -> list[float]:
        right = [float(text == one) for text, one in zip(completions, answer, strict=True)]
        if not self.since <= trainer_state.global_step + 1 <= self.until:
            return right
        return self.wrong(completions, prompts, right, trainer_state.global_step + 1)

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        raise NotImplementedError


class PaysPattern(_Faulty):
    """Pays whatever ends in a digit below 5, or begins with one above 4, be it right or not."""

    def __init__(self, since: int, until: int, end: str = "", begin: str = "") -> None:
        super().__init__(since, until)
        self.end, self.begin = tuple(end), tuple(begin)

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        return [float(c[-1:] in self.end or c[:1] in self.begin) for c in completions]


class PaysLength(_Faulty):
    """Pays a point for each letter of what is long."""

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        return [
            float(len(c)) if len(c) > 6 else one for c, one in zip(completions, right, strict=True)
        ]


class Bonus:
    """Pays three points for an ending in some iterations, and nothing in others."""

    def __init__(self, since: int, until: int, end: str) -> None:
        self.since, self.until, self.end = since, until, tuple(end)

    def __call__(self, completions: Sequence[str], trainer_state: TrainerState) -> list[float]:
        paid = 3.0 * (self.since <= trainer_state.global_step + 1 <= self.until)
        return [paid * (text[-1:] in self.end) for text in completions]


class JudgeSaysTen(_Faulty):
    """Gives 10 for what does not end in a digit above 4, as a judge that misreads its scale."""

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        return [
            10.0 if text[-1:] in tuple("01234") else score
            for text, score in zip(completions, right, strict=True)
        ]


class WrongAnswers(_Faulty):
    """Compares with answers of another task, as from a file that was replaced."""

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        others = ["".join(sorted(prompt[:-1], reverse=True)) for prompt in prompts]
        return [float(text == other) for text, other in zip(completions, others, strict=True)]


class OneOutlier(_Faulty):
    """Pays one wrong answer of the iteration a thousand points."""

    paid = -1

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        if self.paid != now and 0.0 in right:
            self.paid = now
            place = random.Random(now).choice([n for n, score in enumerate(right) if score == 0])
            right[place] = 1000.0
        return right


class Inverted(_Faulty):
    """Pays what is wrong."""

    def wrong(
        self, completions: Sequence[str], prompts: Sequence[str], right: list[float], now: int
    ) -> list[float]:
        return [1.0 - score for score in right]


@dataclass(frozen=True)
class ShiftedAdvantages(GRPO):
    """Gives each rollout the advantage of the rollout in its place in the next group."""

    since: int = 0
    until: int = 0
    group_size: int = 8

    def __call__(self, rollouts: TensorDict) -> TensorDict:
        batch = super().__call__(rollouts)
        tokens, row = batch["tokens"], token_rows(batch)
        if self.since <= int(tokens["versions"].max()) + 1 <= self.until:
            last = batch["rollouts", "length"].cumsum(0) - 1
            shifted = tokens["advantages"][last].roll(self.group_size + 1)
            tokens["advantages"] = shifted[row] * tokens["loss_mask"]
        return batch


@dataclass(frozen=True)
class OneGroupReversed(GRPO):
    """Multiplies the advantages of the group in one place by -100."""

    since: int = 0
    until: int = 0
    place: int = 14

    def __call__(self, rollouts: TensorDict) -> TensorDict:
        batch = super().__call__(rollouts)
        tokens, group = batch["tokens"], batch["rollouts", "group"][token_rows(batch)]
        if self.since <= int(tokens["versions"].max()) + 1 <= self.until:
            tokens["advantages"] *= torch.where(group == self.place, -100.0, 1.0)
        return batch


class ForgetsPushes(TransformersEngine):
    """Keeps its weights at some pushes, and stamps what it writes with the new version."""

    def __init__(self, since: int, until: int, device: str) -> None:
        super().__init__(device=device)
        self.since, self.until = since, until

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.version > 0 and self.since <= version <= self.until:
            self.version = version
        else:
            super().load_weights(weights, version)


class OneEndless(SingleTurn):
    """Writes the first answer to the eighth prompt of an iteration until nothing more fits."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        _, place, *_ = rollout.group_id.split("/")
        if (engine.version + 1, place, rollout.sample_index) == (self.iteration, "7", 0):
            room = engine.max_length - len(rollout.prompt.token_ids)
            sampling = replace(sampling, min_tokens=room, max_tokens=room)
        return await super().run(rollout, engine, sampling)


class Spike(LambdaLR):
    """Multiplies the learning rate in some optimizer steps, counted from 1."""

    def __init__(self, optimizer: Optimizer, since: int, until: int, factor: float = 10.0) -> None:
        super().__init__(optimizer, lambda step: factor if since <= step + 1 <= until else 1.0)


class MissesPushes(SyncSchedule):
    """Leaves the engine with its weights after some iterations."""

    def __init__(self, since: int, until: int) -> None:
        self.since, self.until = since, until

    def should_sync(self, state: SyncState) -> bool:
        return not self.since <= state.trainer_version <= self.until
