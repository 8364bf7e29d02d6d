"""Provide a run of three policies; of one a rank may have no rows."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD

from lightning_rl import (
    GAE,
    Evaluate,
    HFExport,
    IterationCheckpoint,
    K3Penalty,
    LoRA,
    SharedValueHead,
    WarmupCosine,
    WeightSync,
)
from lightning_rl.callbacks import (
    DuplicatesGuard,
    EffectiveSampleGuard,
    LengthGuard,
    LogprobGapGuard,
    LogprobSpikeGuard,
    RLCallback,
    StalenessGuard,
    ZeroAdvantageGuard,
)
from lightning_rl.extend import Agent, Episode, Periodic
from lightning_rl.games import RolePolicy, RolesModule
from lightning_rl.run.digest import digests
from tests.support.grouped import grouped
from tests.support.lots import LotAdapters
from tests.support.ranks_run import failure, strategy_of
from tests.support.small_run import data_module, numbers, trainer_of

NAMES = ("first", "second", "rare")


class Trio(Agent):
    """The first speaks, the second reads it; the third is asked about some prompts only."""

    async def run(self, rollout, engine, sampling):
        episode, own = Episode(rollout), rollout.prompt.token_ids
        _, said = await episode.call(engine, own, sampling, "first")
        _, read = await episode.call(engine, [*own, *said.token_ids, 2], sampling, "second")
        paid = {"first": said, "second": read}
        if int(rollout.prompt.prompt[:-1]) % 3 == 0:
            _, paid["rare"] = await episode.call(engine, [2, *own], sampling, "rare")
        rollout.role_rewards = {name: even_share(c.token_ids) for name, c in paid.items()}
        episode.end()
        return rollout


def even_share(token_ids: list[int]) -> float:
    """Return the even share of the digits; those from 0 to 9 are tokens 3 to 12."""
    return sum(3 <= token <= 12 and token % 2 == 1 for token in token_ids) / len(token_ids)


def mean_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward whole rollouts, whose roles have rewards of their own."""
    return [even_share(ids) for ids in completion_ids]


class Watch(RLCallback):
    """Records rows of metrics, and the rollouts and rows of each policy that a rank has."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.rollouts: list[list[tuple[str, list[list[int]]]]] = []
        self.learned: list[dict[str, int]] = []

    def setup(self, trainer, pl_module, stage) -> None:
        # Adapters are drawn when the model is made, and rank 0's are those of all ranks.
        torch.manual_seed(11 + trainer.global_rank)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.learned.append({})
        told = trainer.train_dataloader.current
        self.rollouts.append([(r.id, [row.token_ids for row in r.rows]) for r in told])

    def on_update_start(self, trainer, pl_module, batch) -> None:
        self.learned[-1][pl_module.name] = len(batch["rollouts"])

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows.append(dict(metrics))


def policy(lr: float, **options: Any) -> RolePolicy:
    # Not Adam, to which a gradient that is twice too large is the same.
    made = {"lora": LoRA(rank=4), "optimizer": lambda p: SGD(p, lr=lr), "max_grad_norm": None}
    return RolePolicy(**grouped(**(made | options), max_tokens_per_micro_batch=24, seed=7))


def three_policies(model: str) -> RolesModule:
    policies = {
        "first": policy(
            1.0,
            max_grad_norm=0.1,
            ppo_epochs=2,
            minibatches=3,
            lr_scheduler=lambda o: WarmupCosine(o, warmup_steps=2, total_steps=24),
        ),
        "second": policy(0.05, schedule=Periodic(every=2), kl=K3Penalty()),
        "rare": policy(0.05, advantage=GAE(), critic=SharedValueHead(), ppo_epochs=2),
    }
    return RolesModule(model, policies)


def fit_roles(
    model: str, strategy: str = "one", *, where: Path, ckpt_path: str | None = None
) -> dict[str, Any]:
    """Run four iterations, saved after each; or the rest of them."""
    watch, module = Watch(), three_policies(model)
    guards = [
        LogprobGapGuard(), LogprobSpikeGuard(), EffectiveSampleGuard(), StalenessGuard(),
        ZeroAdvantageGuard(), LengthGuard(window=1), DuplicatesGuard(window=1),
    ]  # fmt: skip
    callbacks = [
        WeightSync(), Evaluate(2), *guards, watch,
        HFExport(merge_adapters=True), IterationCheckpoint(1, 9),
    ]  # fmt: skip
    trainer = trainer_of(
        where, callbacks, devices=1 if strategy == "one" else 2, strategy=strategy_of(strategy),
        logger=CSVLogger(where), enable_checkpointing=True,
    )  # fmt: skip
    data = data_module(
        engine=LotAdapters(device="cpu"), agent=Trio(), rewards=[mean_share],
        train_prompts=numbers(100, 124, seed=4), evaluation=numbers(90, 93), group_size=3,
        groups_per_iteration=4, iterations_per_epoch=4,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {
        "rows": watch.rows,
        "rollouts": watch.rollouts,
        "learned": watch.learned,
        "versions": module.role_versions,
        "weights": digests(module.state_dict().items()),
        "where": where,
    }


def roles_refused(model: str, strategy: str, *, where: Path) -> dict[str, str]:
    return failure(lambda: fit_roles(model, strategy, where=where))
