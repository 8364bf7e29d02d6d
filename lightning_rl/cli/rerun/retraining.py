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

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.rerun_recorder import environment_of
from lightning_rl.cli.rerun.change import UNCHANGED, Change
from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.batch import token_rows
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import DataError
from lightning_rl.run.hooks import callbacks_of
from lightning_rl.run.processes.dist import gather

Scores = dict[str, dict[str, float]]
"""Scores on held-out prompts: by the score's name, then by prompt."""


@dataclass(frozen=True)
class Retrained:
    """Iterations that were trained again from ``kept``, and their results by version.

    ``shares`` has the effective share of the rollouts of each iteration, ``scores`` those of the
    last version on held-out prompts ({} if it was not evaluated), ``environment`` describes the
    machine.
    """

    kept: KeptWeights
    outcomes: dict[int, Outcome]
    shares: dict[int, float]
    scores: Scores
    environment: dict[str, Any]


def retrain(
    run: RecordedRun,
    version: int,
    latest: int,
    since: int | None = None,
    change: Change = UNCHANGED,
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
    weights = SamplingWeights()
    with remade(run, version, latest, since, [weights, *observers], change) as made:
        scores = held_out_scores(made) if evaluate else {}
        environment = environment_of(made.trainer)
        return Retrained(made.kept, made.outcomes, weights.shares(), scores, environment)


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


class SamplingWeights(RLCallback):
    """Measures the importance weight of each rollout, before each update.

    It is exp(sum of log p_policy - log p_engine) over its trained tokens: how much likelier the
    policy that is about to learn from the rollout makes it than the engine's, which sampled it.
    """

    def __init__(self) -> None:
        self.log_weights: defaultdict[int, list[float]] = defaultdict(list)

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        module = self.policy_module_of(pl_module)
        scored = batch.copy()  # the update shall find no further column
        scored["tokens"] = batch["tokens"].copy()
        budget = module.learner.max_tokens_per_micro_batch
        tokens = module.loaded_policy.score(scored, "again", budget)["tokens"]
        row = token_rows(batch)
        live = tokens["loss_mask"] & ~batch["rollouts", "demonstration"][row]
        gaps = (tokens["again"] - tokens["rollout_logprobs"]).double()[live]
        rollout, place = batch["rollouts", "rollout"][row][live].unique(return_inverse=True)
        sums = torch.zeros(len(rollout), dtype=gaps.dtype, device=gaps.device)
        own = sums.index_add(0, place, gaps).tolist()
        self.log_weights[module.present_iteration] += [w for rank in gather(own) for w in rank]

    def shares(self) -> dict[int, float]:
        """Return the effective share of each iteration's rollouts."""
        return {number: effective_share(own) for number, own in self.log_weights.items() if own}
