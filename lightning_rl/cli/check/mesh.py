"""``lightning-rl check --gpus N``: how N GPUs should share a model; its weights are not read.

Models have no weights, and what they compute is followed with fake tensors: a plan of 8 billion
parameters and rollouts of 128k tokens takes a minute, and no memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_rl.cli.check.gpu_memory import CardPlan
from lightning_rl.cli.check.placement import placement_of
from lightning_rl.cli.check.training import Learning, card_plan
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines.base import Engine
from lightning_rl.errors import ConfigError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.models.parallel.expert import experts_of
from lightning_rl.rollout import Prompt

SPARE = 0.05
"""Share of a GPU that must stay free: plans were within that where they were measured."""


@dataclass(frozen=True)
class Candidate:
    """A way to share a model: ``sequence`` x ``tensor`` GPUs compute a micro-batch together.

    ``expert`` GPUs share a mixture's experts. ``plan`` is the memory of each GPU; ``refused`` says
    why the model cannot be shared in this way.
    """

    sequence: int
    tensor: int
    expert: int
    plan: CardPlan | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if a GPU is large enough, with ``SPARE`` left."""
        return self.plan is not None and self.plan.missing <= -SPARE * self.plan.card

    @property
    def name(self) -> str:
        """The name that is printed."""
        expert = f" x expert {self.expert}" if self.expert > 1 else ""
        return f"sequence {self.sequence} x tensor {self.tensor}{expert}"

    def line(self) -> str:
        """Return a line of text for the user."""
        return f"{self.name}: {self.refused if self.plan is None else self.plan.verdict}"


def candidates(
    module: RolloutModule, data: RLDataModule, prompts: Sequence[Prompt], gpus: int, card_gb: float
) -> Iterator[Candidate]:
    """Yield ways to share a model, those first in which fewer GPUs compute a micro-batch together.

    With equal numbers, sequence parallelism comes before tensor parallelism: an all-to-all of
    heads, and gathered keys if there are fewer heads, send less per layer than all-reduces of
    outputs. A mixture's tokens are sent to their experts only if the experts of a layer are too
    large to gather.
    """
    experts = _shares_of_experts(module, gpus)
    ways = [
        (sequence, tensor, expert)
        for tensor in range(1, gpus + 1)
        for sequence in range(1, gpus + 1)
        if gpus % (sequence * tensor) == 0
        for expert in (experts if tensor == 1 else [1])
    ]
    trainer, learning = module.trainer, Learning(module, data, prompts, gpus)
    alone = replace(placement_of(trainer, torch.device("cuda")), sequence=1, tensor=1, expert=1)
    for way in sorted(ways, key=lambda way: (way[0] * way[1], *way[1:])):
        sequence, tensor, expert = way
        placement = replace(
            alone, shards=gpus // tensor, sequence=sequence, tensor=tensor, expert=expert
        )
        try:
            _, memory = learning.told(placement)
            yield Candidate(*way, card_plan(module, data, memory, card_gb))
        except ConfigError as refusal:
            yield Candidate(*way, None, f"refused: {str(refusal).splitlines()[0]}")


def _shares_of_experts(module: RolloutModule, gpus: int) -> list[int]:
    """Return the numbers of GPUs that can share all policies' experts."""
    policies = (policy.loaded_policy.lm for policy in module.policies.values())
    counts = [max((s.num_experts for s in experts_of(lm)), default=1) for lm in policies]
    return [n for n in range(1, gpus + 1) if gpus % n == 0 and not any(c % n for c in counts)]


def _planned(engine: Engine, gpus: int, nodes: int, card_gb: float) -> str:
    """Say which processes are planned, on which GPUs, and where the engine stands."""
    nodes_text = f"{nodes} nodes with {gpus // nodes} each" if nodes > 1 else "1 node"
    kind = type(engine).__name__
    if engine.serves_all_ranks:
        where = f"{kind} has GPUs of its own, which are not planned"
    elif engine.sleep_level is None:
        where = f"each also has a {kind}"
    else:
        where = f"each also has a {kind}, which sleeps during updates"
    return (
        f"planned: {gpus} GPUs of {card_gb:g} GiB on {nodes_text}, which train as a "
        f"ShardedStrategy and share weights, gradients and optimizer state; {where}:"
    )


def choose(
    module: RolloutModule, data: RLDataModule, prompts: Sequence[Prompt], gpus: int, card_gb: float
) -> tuple[list[str], bool]:
    """Return lines of text, and True if a way to share fits.

    Raises:
        ConfigError: as ``configure_model`` does; if the nodes cannot have equally many of the GPUs.
    """
    nodes = module.trainer.num_nodes
    if gpus % nodes:
        raise ConfigError(
            f"--gpus={gpus} cannot be divided among trainer.num_nodes={nodes}; pass the GPUs of "
            f"all nodes together, a multiple of {nodes}"
        )
    with torch.device("meta"):
        module.configure_model()
    meshes = list(candidates(module, data, prompts, gpus, card_gb))
    lines = [_planned(data.engine, gpus, nodes, card_gb)]
    lines += [f"  {candidate.line()}" for candidate in meshes]
    best = next((candidate for candidate in meshes if candidate.fits), None)
    if best is None:
        planned = [(one.plan.missing, one.line(), one.plan.advice) for one in meshes if one.plan]
        advice = ""
        if planned:
            _, line, remedy = min(planned)
            advice = f"; nearest is {line}; {remedy}"
        return [*lines, f"none of them fits with {SPARE:.0%} to spare{advice}"], False
    return [
        *lines,
        f"use {best.name}: it leaves {SPARE:.0%} of each GPU free "
        "with the fewest GPUs per micro-batch, and among equals it sends the least data per layer:",
        f"  --trainer.devices {gpus // nodes} --trainer.num_nodes {nodes} "
        "--trainer.strategy lightning_rl.ShardedStrategy "
        f"--trainer.strategy.sequence {best.sequence} --trainer.strategy.tensor {best.tensor}"
        + (f" --trainer.strategy.expert {best.expert}" if best.expert > 1 else ""),
    ], True
