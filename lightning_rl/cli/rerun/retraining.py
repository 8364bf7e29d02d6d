"""Trains recorded iterations again, and measures the resulting policy: its distance from the one
that sampled, and its score on held-out prompts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.rerun_recorder import environment_of
from lightning_rl.cli.rerun.change import UNCHANGED, RerunChange
from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.loader import LazyLoader, RolloutLoader, trainable
from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import packed_rows
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.run.hooks import callbacks_of
from lightning_rl.run.processes.dist import gather

Scores = dict[str, dict[str, float]]
"""Scores on held-out prompts: by the score's name, then by prompt."""


@dataclass(frozen=True)
class Retrained:
    """Iterations that were trained again from ``kept``, and their results by version.

    ``seen`` has the rollouts of each iteration as its update saw them, ``scores`` those of the last
    version on held-out prompts ({} if it was not evaluated), ``environment`` describes the machine.
    """

    kept: KeptWeights
    outcomes: dict[int, Outcome]
    seen: dict[int, list["Seen"]]
    scores: Scores
    environment: dict[str, Any]

    @property
    def shares(self) -> dict[int, float]:
        """The effective share of the rollouts of each iteration."""
        weights = {v: [one.log_weight for one in own] for v, own in self.seen.items()}
        return {v: effective_share(own) for v, own in weights.items() if own}


def retrain(
    run: RecordedRun,
    version: int,
    latest: int,
    since: int | None = None,
    change: RerunChange = UNCHANGED,
    evaluate: bool = False,
    observers: Sequence[Callback] = (),
) -> Retrained:
    """Train recorded iterations again up to ``version``, as :func:`remade` does.

    Args:
        evaluate: also evaluate it on the run's held-out prompts, with the run's engine.

    Raises:
        ConfigError: if the run's configuration or the change does not work here.
        DataError: if the run kept too little, or has no held-out prompts to evaluate on.
        EngineError: if the engine fails.
    """
    watch = Watch()
    with remade(run, version, latest, since, [watch, *observers], change) as made:
        scores = held_out_scores(made) if evaluate else {}
        environment = environment_of(made.trainer)
        return Retrained(made.kept, made.outcomes, watch.seen, scores, environment)


def held_out_scores(made: Remade) -> Scores:
    """Evaluate the rebuilt weights on the run's held-out prompts, always with the same seeds.

    Raises:
        DataError: if the run has none.
        EngineError: if the engine fails, or does not hold the weights.
    """
    data, scores = made.datamodule, Scores()
    if not isinstance(data, CollectingDataModule) or not data.evaluates:
        fix = getattr(data, "nothing_to_evaluate", "only runs with an engine do")
        raise DataError(f"the run has no held-out prompts to evaluate on; {fix}")

    def evaluate(_: int) -> dict[str, float]:
        scores.update(data.scores(data.evaluate()[0]))
        return {}

    callbacks_of(made.trainer).append(made.sync)
    data.test_series = LazyLoader(evaluate, 1)
    made.trainer.test(made.module, datamodule=data, verbose=False)
    return scores


def effective_share(log_weights: Sequence[float]) -> float:
    """Return Kish's effective sample size of n importance weights w as a share of n.

    (sum w)^2 / (n sum w^2) (Kish 1965, "Survey Sampling"), in (0, 1]; 1 if all are equal.
    """
    highest = max(log_weights)
    weights = [exp(one - highest) for one in log_weights]
    return fsum(weights) ** 2 / (len(weights) * fsum(w * w for w in weights))


@dataclass(frozen=True)
class Seen:
    """A rollout as an update sees it.

    ``log_weight`` is that of its importance: the sum of log p_policy - log p_engine over its
    ``tokens``, those trained on; how much likelier the policy that learns from it makes it than the
    engine's, which sampled it. ``mass`` sums the tokens' absolute advantages, and ``advantage`` is
    their mean.
    """

    rollout: Rollout
    tokens: int
    log_weight: float
    mass: float
    advantage: float

    @property
    def reward(self) -> float:
        return self.rollout.reward or 0.0

    @property
    def gap(self) -> float:
        """The absolute log weight per token, in nats."""
        return abs(self.log_weight) / self.tokens


class Watch(RLCallback):
    """Notes all rollouts before each update, as it sees them."""

    def __init__(self) -> None:
        self.seen: defaultdict[int, list[Seen]] = defaultdict(list)

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        module = self.policy_module_of(pl_module)
        scored = batch.copy()  # the update shall find no further column
        scored["tokens"] = batch["tokens"].copy()
        budget = module.learner.max_tokens_per_micro_batch
        tokens, row = (
            module.loaded_policy.score(scored, "again", budget)["tokens"],
            token_rows(batch),
        )
        live = tokens["loss_mask"] & ~batch["rollouts", "demonstration"][row]
        number = batch["rollouts", "rollout"][row][live]
        loader = trainer.train_dataloader
        assert isinstance(loader, RolloutLoader)
        rollouts = {id(r): r for r, _ in packed_rows(trainable(loader.current))}

        def sums(values: Tensor) -> list[float]:
            zeros = torch.zeros(len(rollouts), dtype=torch.double, device=number.device)
            return list(zeros.index_add(0, number, values.double()).tolist())

        gaps, advantages = tokens["again"] - tokens["rollout_logprobs"], tokens["advantages"]
        columns = sums(live[live]), sums(gaps[live]), sums(advantages[live].abs())
        found = [
            Seen(rollout, int(count), weight, mass, total / count)
            for rollout, count, weight, mass, total in zip(
                rollouts.values(), *columns, sums(advantages[live]), strict=True
            )
            if count
        ]
        self.seen[module.present_iteration] += [one for rank in gather(found) for one in rank]
