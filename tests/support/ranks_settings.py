"""Name settings of runs, which one process and several train with: ``settings("lora", ...)``."""

import operator
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from lightning_rl.agents.base import Environment, Reply
from lightning_rl.agents.branching import Branching, RandomCalls
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.algos.advantages import GAE, Advantage
from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.experts import LoadBalance, OldRouting, RolloutRouting
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.tree import TreeRLOO
from lightning_rl.algos.turns import GiGPO, TurnGAE
from lightning_rl.callbacks import (
    DuplicatesGuard,
    Evaluate,
    HFExport,
    IterationCheckpoint,
    LengthGuard,
    PreviewTable,
    RolloutRecorder,
    RunReport,
)
from lightning_rl.collect.mixture import Mixture, PromptSet
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.samplers import Uniform
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.curriculum import PassRateCurriculum
from lightning_rl.data.mixing import ByPassRate
from lightning_rl.engines.sampling import Sampling
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.quantization import NF4
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.reference import BaseReference, FrozenReference, PeriodicReference
from lightning_rl.rewards.rules import EnvironmentReward
from lightning_rl.rollout import Prompt
from lightning_rl.sync.schedule import SyncSchedule, SyncState
from tests.support.lots import LotEngine
from tests.support.ranks_faults import (
    BreaksOnRankOne,
    NotOnRankOne,
    PoisonsRankOne,
    StaleOnRankOne,
    StopsWhenCollected,
    broken_on_rank_one,
)
from tests.support.ranks_run import GROUP_SIZE, failure, fit, prompts, strategy_of

Settings = dict[str, Any]


class SharedEngine(LotEngine):
    """One for all ranks, as servers are."""

    serves_all_ranks = True


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # Adam divides a gradient by its own size. Without this eps, one that is made of rounding alone
    # would move its weight as far as any other.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, weight_decay=0.0, fused=True)


def eight_bits(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3)


def everything() -> list[Any]:
    """Return callbacks that look at rollouts, or write files."""
    return [
        Evaluate(every_n_iterations=2), PreviewTable(), RolloutRecorder(), HFExport(), RunReport(),
        LengthGuard(window=1), DuplicatesGuard(window=1),
    ]  # fmt: skip


def critic() -> Settings:
    """Return settings with all that may be sharded, and an advantage normalised over all ranks."""
    return {
        "advantage": GAE(),
        "critic": SharedValueHead(),
        "kl": K3Penalty(),
        "optimizer": adamw,
        "max_grad_norm": 1.0,
    }


def separate(model: str) -> Settings:
    """Return a critic and a reference that are read from files of their own."""
    return {
        "advantage": GAE(),
        "critic": SeparateValueHead(model),
        "kl": K3Penalty(),
        "reference": FrozenReference(model),
    }


def replaying(where: Path) -> Settings:
    """Return an odd number of older groups beside the fresh ones."""
    buffer = ReplayBuffer(str(where / "replay.sqlite"), sampler=Uniform(groups=3), seed=1)
    return {"data": {"buffer": buffer}, "correction": TokenTIS()}


def streaming() -> Settings:
    """Complete groups one after another."""
    engine = LotEngine(max_batch_size=GROUP_SIZE)
    return {"collector": StreamedCollector(max_groups_in_flight=1), "engine": engine}


class Measuring(SyncSchedule):
    """Asks for the KL after every iteration, and pushes if there is any."""

    def should_sync(self, state: SyncState) -> bool:
        return state.kl() > 0


class Evens(Environment):
    """Pays each turn for its even digits; what counts later is how many there were."""

    def __init__(self, prompt: Prompt) -> None:
        self.count = 0

    def step(self, turn: str) -> Reply:
        found = sum(c in "02468" for c in turn)
        self.count += found
        return Reply("=", reward=found / 4, state=str(self.count))


def turns(advantage: Advantage) -> Settings:
    """Return three turns of two tokens each, and branches where these are told apart."""
    data = {
        "agent": MultiTurn(Evens, max_turns=3, max_turn_tokens=2),
        "plan": Branching(at=RandomCalls(0.5)) if advantage.takes_branches else None,
        "rewards": [EnvironmentReward()],
        "sampling": Sampling(max_tokens=8),
    }
    head = SharedValueHead() if advantage.needs_values else None
    return {"advantage": advantage, "critic": head, "data": data}


class Logged(Mixture):
    """Remembers what was drawn: on all ranks the same, though none may see the other's."""

    log: list[list[str]]

    def draw(self, count: int) -> list[Prompt]:
        drawn = super().draw(count)
        self.log = [*getattr(self, "log", []), *([p.set, p.id] for p in drawn)]
        return drawn


def mixed() -> Logged:
    """Return a set in which half a completion is right, and one in which nearly nothing is."""
    sets = [
        PromptSet("a", prompts(3), success_reward=0.5),
        PromptSet("b", prompts(4), success_reward=0.9, weight=2.0),
    ]
    return Logged(sets, ByPassRate(memory=0.0), seed=2)


RUNS: dict[str, Callable[[str, Path], Settings]] = {
    "everything": lambda model, where: {"callbacks": everything()},
    "export": lambda model, where: {"callbacks": [HFExport(merge_adapters=True)]},
    "saved": lambda model, where: {
        "callbacks": [IterationCheckpoint(1, 9)], "optimizer": adamw, "epochs": 2,
    },
    "brief": lambda model, where: {"iterations": 1, "epochs": 3},
    # In a second epoch rounding would decide which ratios are clipped.
    "one_update": lambda model, where: {
        "iterations": 1, "ppo_epochs": 1, "data": {"engine": LotEngine("float32")}
    },
    "bf16": lambda model, where: {"precision": "bf16-mixed"},
    "bf16_true": lambda model, where: {"precision": "bf16-true"},
    "three": lambda model, where: {"iterations": 3},
    "shared": lambda model, where: {"data": {"engine": SharedEngine()}},
    "critic": lambda model, where: critic(),
    "clipped": lambda model, where: {"max_grad_norm": 0.1},
    # Optimizer steps on some of a batch's groups, of which a rank may have none.
    "minibatches": lambda model, where: {"minibatches": 3},
    "lora": lambda model, where: {"lora": LoRA(rank=4)},
    "qlora": lambda model, where: {"lora": LoRA(rank=4, quantization=NF4())},
    "base": lambda model, where: {"kl": K3Penalty(), "reference": BaseReference()},
    "renewed": lambda model, where: {"kl": K3Penalty(), "reference": PeriodicReference(1)},
    "separate": lambda model, where: separate(model),
    "recomputed": lambda model, where: {"gradient_checkpointing": True},
    "host": lambda model, where: {
        "gradient_checkpointing": Recompute(inputs="host", mlp_tokens=16)
    },
    "attention": lambda model, where: {
        "gradient_checkpointing": Recompute(inputs="host", keep="attention")
    },
    "turns": lambda model, where: turns(GiGPO()),
    "branches": lambda model, where: turns(TreeRLOO()),
    "turns_critic": lambda model, where: turns(TurnGAE()),
    "curriculum": lambda model, where: {
        "data": {"train_prompts": PassRateCurriculum(prompts(), 0.5)}
    },
    "mixture": lambda model, where: {"data": {"train_prompts": mixed()}},
    "replay": lambda model, where: replaying(where),
    "streamed": lambda model, where: {"data": streaming()},
    "ahead": lambda model, where: {"data": {"collector": AsyncCollector()}},
    "stale_ahead": lambda model, where: {"data": {"collector": AsyncCollector(max_staleness=1)}},
    "eight_bits": lambda model, where: {"optimizer": eight_bits},
    "measuring": lambda model, where: {"schedule": Measuring()},
    "poisoned": lambda model, where: {"callbacks": [PoisonsRankOne()]},
    "filtered": lambda model, where: {"data": {"selection": [NotOnRankOne()]}},
    "broken_reward": lambda model, where: {"data": {"rewards": [broken_on_rank_one]}},
    "broken_push": lambda model, where: {"data": {"engine": BreaksOnRankOne()}},
    "stale_push": lambda model, where: {"data": {"engine": StaleOnRankOne()}},
    "three_groups": lambda model, where: {"data": {"groups_per_iteration": 3}},
    "stops": lambda model, where: {"callbacks": [StopsWhenCollected()]},
    "replayed": lambda model, where: {"routing_replay": RolloutRouting()},
    "balanced": lambda model, where: {
        "routing_replay": OldRouting(), "balance": LoadBalance(0.01)
    },
}  # fmt: skip
"""Settings by name, for a model and the folder of the run."""


def settings_of(names: str, model: str, where: Path) -> Settings:
    """Join several of RUNS, by names with spaces between: a later one has the last word."""
    found = [RUNS[name](model, where) for name in names.split()]
    callbacks = [callback for one in found for callback in one.get("callbacks", ())]
    data = reduce(operator.or_, (one.get("data", {}) for one in found), {})
    return reduce(operator.or_, found, {}) | {"callbacks": callbacks, "data": data}


def trained(
    model: str,
    names: str = "",
    strategy: str = "one",
    *,
    where: Path,
    ckpt_path: str | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """Train with settings, by a strategy with this layout, or do the rest of such a run."""
    options = settings_of(names, model, where)
    return fit(model, where, strategy_of(strategy, **layout), ckpt_path=ckpt_path, **options)


def failing(
    model: str, names: str, strategy: str = "one", *, where: Path, **layout: Any
) -> dict[str, Any]:
    """Return the error of such a run, and where it is."""
    error = failure(lambda: trained(model, names, strategy, where=where, **layout))
    return error | {"where": where}


def mixed_ahead(model: str, *, where: Path) -> dict[str, Any]:
    """Let ranks draw ahead of what they learn, each at its own pace."""
    mixture = mixed()
    data = {"train_prompts": mixture, "collector": AsyncCollector(), "selection": [NotOnRankOne()]}
    strategy = strategy_of("ddp")
    result = fit(model, where, strategy, iterations=6, data=data, use_rollout_logprobs=True)
    return result | {"drawn": mixture.log, "learned": mixture.mixing.state_dict()}
