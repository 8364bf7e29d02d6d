"""What two training processes do in tests/integration/test_ddp.py, and one for comparison.

    RANK=0 WORLD_SIZE=2 ... python -m tests.support.ranks_run <model> <folder>

The environment is torchrun's. All scenarios run one after another in one process group, and each
leaves ``<scenario>_<rank>.json``.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from lightning_rl.agents.base import Agent, Environment, Reply
from lightning_rl.agents.branching import Branching, RandomCalls
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.algos.advantages import GAE, Advantage
from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.kl import K3Penalty
from lightning_rl.algos.tree import TreeRLOO
from lightning_rl.algos.turns import GiGPO, TurnGAE
from lightning_rl.callbacks import (
    Evaluate,
    HFExport,
    IterationCheckpoint,
    PreviewTable,
    RewardAlarms,
    RLCallback,
    RolloutRecorder,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.collect.ahead import AsyncCollector
from lightning_rl.collect.collector import GroupFilter
from lightning_rl.collect.mixture import Mixture, PromptSet
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.samplers import Uniform
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.curriculum import PassRateCurriculum
from lightning_rl.data.mixing import ByPassRate
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.sampling import Sampling
from lightning_rl.engines.transformers import TransformersEngine
from lightning_rl.learn.own_loop import FabricDDP
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.quantization import NF4
from lightning_rl.models.recompute import Recompute
from lightning_rl.models.sharding import full_tensor
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.rules import EnvironmentReward
from lightning_rl.rollout import Prompt
from lightning_rl.run import dist
from tests.support.lots import LotEngine
from tests.support.ranks_bare import bare_loop
from tests.support.ranks_checks import guarded, rerun
from tests.support.ranks_roles import fit_roles, roles_and_rest
from tests.support.small_run import trainer_of

GROUPS, GROUP_SIZE = 4, 3
ITERATIONS = 3


class Seen(RLCallback):
    """Rows of metrics, what was monitored, and the rollouts that this rank trained on."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.monitored: list[dict[str, float]] = []
        self.rollouts: list[list[tuple[str, list[int]]]] = []
        self.start = 0.0
        """Of the trained weights' sizes, the sum."""

    def setup(self, trainer, pl_module, stage) -> None:
        # Just before the model is made. What is drawn at random for it, such as a LoRA, is rank 0's
        # on all ranks.
        torch.manual_seed(11 + int(os.environ.get("RANK", 0)))

    def on_train_start(self, trainer, pl_module) -> None:
        trained = (p.detach() for p in pl_module.policy.parameters() if p.requires_grad)
        self.start = sum(float(full_tensor(weight).double().abs().sum()) for weight in trained)

    def on_update_start(self, trainer, pl_module, batch) -> None:
        trained = trainer.train_dataloader.current
        self.rollouts.append([(r.id, r.token_ids) for r in trained])

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows.append(dict(metrics))
        known = trainer.callback_metrics
        timed = ("time/", "sync/seconds")
        self.monitored.append({n: float(v) for n, v in known.items() if not n.startswith(timed)})


class SharedEngine(LotEngine):
    """One for all ranks, as servers are."""

    serves_all_ranks = True


def share_of_even_digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within groups, so that all of them teach something."""
    return [
        sum(c in "02468" for c in completion) / max(1, len(completion))
        for completion in completions
    ]


def rows(count: int = 40) -> Iterable[dict[str, str]]:
    return [{"prompt": f"{i % 10}{i // 10}="} for i in range(count)]


def sharded(save_distributed_checkpoint: bool = False, ranks: int = 2) -> ModelParallelStrategy:
    return ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=save_distributed_checkpoint)


def fit(
    model: str,
    where: Path,
    strategy: Strategy | str = "auto",
    *extra: Any,
    processes: int = 2,
    iterations: int = ITERATIONS,
    epochs: int = 1,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    curriculum: bool = False,
    precision: Any = "32-true",
    **options: Any,
) -> dict[str, Any]:
    """A short run in this process, together with the others of its group."""
    prompts = IterablePrompts(rows, seed=3)
    settings: dict[str, Any] = {
        "engine": LotEngine(),
        "train_prompts": PassRateCurriculum(prompts, 0.5) if curriculum else prompts,
        "eval_prompts": IterablePrompts(lambda: rows(5)),
        "rewards": [share_of_even_digits],
        "sampling": Sampling(max_tokens=6),
        "groups_per_iteration": GROUPS,
        "group_size": GROUP_SIZE,
        "iterations_per_epoch": iterations,
        "seed": 5,
    }
    settings |= data or {}
    module = PolicyModule(
        model,
        **{
            # Not Adam, to which a gradient that is twice too large is the same.
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.01),
            "max_grad_norm": None,
            "max_tokens_per_pack": 24,
            "ppo_epochs": 2,
            "seed": 7,
            **options,
        },
    )
    seen = Seen()
    trainer = trainer_of(
        where,
        [WeightSync(), *extra, seen, StepTimer()],
        devices=1 if strategy == "auto" else processes,
        strategy=strategy,
        precision=precision,
        max_epochs=epochs,
        logger=CSVLogger(where),
        enable_checkpointing=any(isinstance(e, IterationCheckpoint) for e in extra),
    )
    trainer.fit(module, RLDataModule(**settings), ckpt_path=ckpt_path)
    kept = ("rows", "monitored", "rollouts", "start")
    return {name: getattr(seen, name) for name in kept}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)


def everything() -> list[Any]:
    """Callbacks that look at rollouts, or write files."""
    return [
        Evaluate(every_n_iterations=2), PreviewTable(), RolloutRecorder(), RewardAlarms(window=1),
        HFExport(), RunReport(),
    ]  # fmt: skip


def critic() -> dict[str, Any]:
    """All that may be sharded, and an advantage that is normalised over all ranks."""
    return {
        "advantage": GAE(),
        "value_head": SharedValueHead(),
        "kl": K3Penalty(),
        "optimizer": adamw,
        "max_grad_norm": 1.0,
    }


def in_few_bits() -> dict[str, Any]:
    """A LoRA whose frozen base is packed."""
    return {"lora": LoRA(rank=4, quantization=NF4())}


def in_minibatches() -> dict[str, Any]:
    """Optimizer steps on some of a batch's groups, of which a rank may have none."""
    return {"minibatches": 3}


class PoisonsRankOne(RLCallback):
    """Advantages that are NaN in the second iteration, on rank 1 alone."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if dist.rank() == 1 and pl_module.iteration == 1:
            batch["tokens", "advantages"][:] = math.nan


class NotOnRankOne(GroupFilter):
    """Rejects the first two groups that rank 1 sees; the others have no part in it."""

    def __init__(self) -> None:
        self.left = 2 * dist.rank()

    def keep(self, group: Any) -> bool:
        self.left -= 1
        return self.left < 0


def broken_on_rank_one(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if dist.rank() == 1:
        raise RuntimeError("the grader is down")
    return [0.0 if i else 1.0 for i in range(len(completions))]


class BreaksOnRankOne(TransformersEngine):
    """Refuses the second push in the middle of it."""

    def load_weights(self, weights, version) -> None:
        if dist.rank() == 1 and version == 1:
            next(iter(weights))
            raise RuntimeError("out of memory")
        super().load_weights(weights, version)


class StaleOnRankOne(TransformersEngine):
    """Keeps its first weights, and says otherwise."""

    def load_weights(self, weights, version) -> None:
        if dist.rank() == 1 and version == 1:
            self.version = version
        else:
            super().load_weights(weights, version)


def failure(call: Callable[[], Any]) -> dict[str, str]:
    """The class and the message of what it raises."""
    try:
        call()
    except Exception as error:  # whatever it is: the test looks at it
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "none", "message": ""}


def replaying(where: Path) -> dict[str, Any]:
    """An odd number of older groups beside the fresh ones."""
    buffer = ReplayBuffer(str(where / "replay.sqlite"), sampler=Uniform(groups=3), seed=1)
    return {"data": {"buffer": buffer}, "correction": TokenTIS()}


def streaming() -> dict[str, Any]:
    """Groups are complete one after another."""
    engine = LotEngine(max_batch_size=GROUP_SIZE)
    return {"collector": StreamedCollector(max_groups_in_flight=1), "engine": engine}


class Evens(Environment):
    """Pays each turn for its even digits; what counts later is how many there were."""

    def __init__(self, prompt: Prompt) -> None:
        self.count = 0

    def step(self, turn: str) -> Reply:
        found = sum(c in "02468" for c in turn)
        self.count += found
        return Reply("=", reward=found / 4, state=str(self.count))


def turns(advantage: Advantage) -> dict[str, Any]:
    """Three turns of two tokens each, and branches where these are told apart."""
    agent: Agent = MultiTurn(Evens, max_turns=3, max_turn_tokens=2)
    if advantage.takes_branches:
        agent = Branching(agent, at=RandomCalls(0.5))
    data = {"agent": agent, "rewards": [EnvironmentReward()], "sampling": Sampling(max_tokens=8)}
    head = SharedValueHead() if advantage.needs_values else None
    return {"advantage": advantage, "value_head": head, "data": data}


class Logged(Mixture):
    """Remembers what was drawn: on all ranks the same, though none may see the other's."""

    log: list[list[str]]

    def draw(self, count: int) -> list[Prompt]:
        drawn = super().draw(count)
        self.log = [*getattr(self, "log", []), *([p.set, p.id] for p in drawn)]
        return drawn


def mixed() -> Logged:
    """One set in which half a completion is right, and one in which nearly nothing is."""
    sets = [
        PromptSet("a", IterablePrompts(rows, seed=3), success_reward=0.5),
        PromptSet("b", IterablePrompts(rows, seed=4), success_reward=0.9, weight=2.0),
    ]
    return Logged(sets, ByPassRate(memory=0.0), seed=2)


def mixed_ahead(model: str, where: Path) -> dict[str, Any]:
    """Ranks draw ahead of what they learn, each at its own pace."""
    prompts = mixed()
    data = {"train_prompts": prompts, "collector": AsyncCollector(), "filters": [NotOnRankOne()]}
    result = fit(model, where, DDPStrategy(), iterations=6, data=data, trust_engine_logprobs=True)
    return result | {"drawn": prompts.log, "learned": prompts.mixing.state_dict()}


def scenarios(model: str, where: Path) -> dict[str, Callable[[], Any]]:
    def run(name: str, strategy: Strategy, *extra: Any, **options: Any) -> dict[str, Any]:
        return fit(model, where / name, strategy, *extra, **options)

    def fails(name: str, strategy: Strategy, **options: Any) -> dict[str, str]:
        return failure(lambda: run(name, strategy, **options))

    return {
        "ddp": lambda: run("ddp", DDPStrategy(), *everything()),
        "fsdp": lambda: run("fsdp", sharded(), *everything()),
        "ddp_critic": lambda: run("ddp_critic", DDPStrategy(), **critic()),
        "fsdp_critic": lambda: run("fsdp_critic", sharded(), **critic()),
        "fsdp_lora": lambda: run(
            "fsdp_lora", sharded(), HFExport(merge_adapters=True), lora=LoRA(rank=4)
        ),
        "ddp_qlora": lambda: run("ddp_qlora", DDPStrategy(), **in_few_bits()),
        "fsdp_qlora": lambda: run(
            "fsdp_qlora", sharded(), HFExport(merge_adapters=True), **in_few_bits()
        ),
        "ddp_minibatches": lambda: run(
            "ddp_minibatches", DDPStrategy(), *everything(), **in_minibatches()
        ),
        "fsdp_minibatches": lambda: run(
            "fsdp_minibatches", sharded(), HFExport(), **in_minibatches()
        ),
        "ddp_critic_minibatches": lambda: run(
            "ddp_critic_minibatches", DDPStrategy(), **critic(), **in_minibatches()
        ),
        "ddp_turns": lambda: run("ddp_turns", DDPStrategy(), **turns(GiGPO())),
        "ddp_branches": lambda: run("ddp_branches", DDPStrategy(), **turns(TreeRLOO())),
        "ddp_turns_critic": lambda: run("ddp_turns_critic", DDPStrategy(), **turns(TurnGAE())),
        "curriculum": lambda: run("curriculum", DDPStrategy(), curriculum=True),
        "mixture": lambda: run("mixture", DDPStrategy(), data={"train_prompts": mixed()}),
        "mixture_ahead": lambda: mixed_ahead(model, where / "mixture_ahead"),
        "shared": lambda: run(
            "shared", DDPStrategy(), *everything(), data={"engine": SharedEngine()}
        ),
        "nonfinite_ddp": lambda: run("nonfinite_ddp", DDPStrategy(), PoisonsRankOne()),
        "nonfinite_fsdp": lambda: run("nonfinite_fsdp", sharded(), PoisonsRankOne()),
        "filter": lambda: run("filter", DDPStrategy(), data={"filters": [NotOnRankOne()]}),
        "reward_error": lambda: fails(
            "reward_error", DDPStrategy(), data={"rewards": [broken_on_rank_one]}
        ),
        "push_error": lambda: fails("push_error", sharded(), data={"engine": BreaksOnRankOne()}),
        "stale_error": lambda: fails("stale_error", sharded(), data={"engine": StaleOnRankOne()}),
        "config_error": lambda: fails(
            "config_error", DDPStrategy(), data={"groups_per_iteration": 3}
        ),
        "tensor_parallel": lambda: fails("tensor_parallel", ModelParallelStrategy(1, 2)),
        "bare_loop": lambda: bare_loop(model, rows(), share_of_even_digits, FabricDDP()),
        "guards": lambda: guarded(model, where / "guards", rows, share_of_even_digits),
        "again": lambda: rerun(model, where / "again", rows()),
        "replay": lambda: run("replay", DDPStrategy(), **replaying(where / "replay")),
        "streamed": lambda: run(
            "streamed",
            DDPStrategy(),
            *everything(),
            data=streaming(),
            gradient_checkpointing=Recompute(every=2, inputs="host"),
        ),
        "streamed_minibatches": lambda: run(
            "streamed_minibatches", DDPStrategy(), data=streaming(), **in_minibatches()
        ),
        "roles": lambda: roles_and_rest(model, where / "roles", DDPStrategy),
        "roles_fsdp": lambda: failure(lambda: fit_roles(model, where / "roles_fsdp", sharded())),
        "streamed_fsdp": lambda: fails("streamed_fsdp", sharded(), data=streaming()),
    }  # fmt: skip


def run_all(scenarios: Callable[[str, Path], dict[str, Callable[[], Any]]]) -> None:
    """All scenarios, or those named on the command line."""
    model, where, *only = sys.argv[1:]
    rank = os.environ["RANK"]
    for name, scenario in scenarios(model, Path(where)).items():
        if not only or name in only:
            result = scenario()
            (Path(where) / f"{name}_{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_all(scenarios)
