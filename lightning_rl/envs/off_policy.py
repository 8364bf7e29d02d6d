"""OffPolicyModule: what modules that learn from the steps of earlier policies have in common."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics
from lightning_rl.envs.base import EnvModule, Measured, add, summed_up
from lightning_rl.envs.collector import seeded
from lightning_rl.envs.networks.exploring import ExploringAgent
from lightning_rl.envs.networks.targets import TargetUpdate
from lightning_rl.envs.transitions import TransitionBuffer, Transitions, transitions_of
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.run.processes.dist import all_reduce_max, rank, world_size
from lightning_rl.run.seeding import derived_seed, run_seed

UPDATES = 2**31 + 1
"""Index for seeds of updates; different from every environment's."""


class OffPolicyModule(EnvModule):
    """Keeps steps in a replay buffer, and in each iteration learns from a sample of them.

    A target network follows each agent's values. Until ``warmup_frames`` steps were collected, all
    actions are random and nothing is learned.

    Raises:
        ConfigError: for values out of range.
    """

    agent_class: ClassVar[type[ExploringAgent]]
    """The class of its agents."""
    agents: Mapping[str, ExploringAgent]
    compile_agents = False
    updates: Tensor
    """Number of optimizer steps so far."""

    def __init__(
        self,
        agents: dict[str, Any] | None,
        buffer: TransitionBuffer | None,
        gamma: float,
        target_update: TargetUpdate,
        warmup_frames: int,
        updates_per_iteration: int,
        batch_size: int,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        max_grad_norm: float | None,
        seed: int | None,
    ) -> None:
        super().__init__()
        require_at_least(1, updates_per_iteration=updates_per_iteration, batch_size=batch_size)
        require_at_least(0, warmup_frames=warmup_frames)
        require_finite(max_grad_norm=max_grad_norm)
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma={gamma} must be in [0, 1]")
        self.automatic_optimization = False
        self.given_agents = agents or {}
        self.buffer = TransitionBuffer() if buffer is None else buffer
        self.gamma = gamma
        self.target_update = target_update
        self.warmup_frames = warmup_frames
        self.updates_per_iteration = updates_per_iteration
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.seed = run_seed(seed)
        self.targets: Mapping[str, nn.Module] = cast(Any, nn.ModuleDict())
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    # ---------------------------------------------------------------- what a subclass says

    @abstractmethod
    def exploration(self, iteration: int) -> float:
        """Return the share of random actions in an iteration after the warm-up."""

    @abstractmethod
    def valuing(self, agent: Any) -> nn.Module:
        """Return the part of an agent that a target network follows."""

    @abstractmethod
    def loss(self, agent: Any, target: Any, steps: Transitions) -> tuple[Tensor, Metrics]:
        """Return a loss per step (M, *A), of all that is learned, and metrics."""

    # ---------------------------------------------------------------- set-up

    def default_agent(self) -> ExploringAgent:
        return self.agent_class()

    def configure_model(self) -> None:
        """Build the agents, and target networks that start as their copies (once)."""
        super().configure_model()
        for name, agent in self.agents.items():
            if name not in self.targets:
                target = deepcopy(self.valuing(agent)).requires_grad_(False)
                cast(nn.ModuleDict, self.targets)[name] = target

    def check_agents(self) -> None:
        """Refuse agents and settings that do not work with single steps of earlier policies.

        Raises:
            ConfigError: names the agent, or the setting.
        """
        for name, agent in self.agents.items():
            if not isinstance(agent, kind := self.agent_class):
                raise ConfigError(
                    f"{type(self).__name__} trains a {kind.__name__}, but agent {name!r} "
                    f"is {type(agent).__name__}; use that agent, or ActorCriticModule"
                )
            if agent.space is not None and agent.space.mask is not None:
                raise ConfigError(
                    f"{type(self).__name__} learns from single steps, but agent {name!r} pauses in "
                    "some of them; use ActorCriticModule"
                )
        if self.batch_size % world_size():
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of the {world_size()} "
                "processes, since each samples equally many steps"
            )

    def stateful_parts(self) -> dict[str, Any]:
        return {"buffer": self.buffer}

    # ---------------------------------------------------------------- one iteration

    @property
    def frames(self) -> int:
        """Steps collected on all ranks, taking the rank with the fewest as the measure."""
        return -int(all_reduce_max(-self.buffer.added)) * world_size()

    @property
    def is_warm(self) -> bool:
        """Return True if the warm-up is over."""
        return self.frames >= self.warmup_frames

    def on_train_start(self) -> None:
        super().on_train_start()
        self._explore()

    def _explore(self) -> None:
        """Set the share of random actions of the next batch."""
        share = self.exploration(self.iteration) if self.is_warm else 1.0
        for agent in self.agents.values():
            agent.exploration = share

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one iteration: store the steps of the batch, and learn from sampled ones."""
        skipped = self.is_skipped(batch)
        metrics = {"policy/exploration": next(iter(self.agents.values())).exploration}
        with self.clock("train"):
            self.buffer.add(transitions_of(batch, self.agents))
            if self.frames and self.is_warm and not skipped:
                metrics |= self.update()
        metrics["buffer/size"] = float(len(self.buffer) * world_size())
        self.end_iteration(metrics)
        self._explore()
        self.record(metrics)

    def update(self) -> dict[str, float]:
        """Take the iteration's optimizer steps; return metrics."""
        learning = self.learning()
        measured: Measured = defaultdict(list)
        self.nonfinite_steps = 0
        with seeded(derived_seed(self.seed, UPDATES, self.iteration, rank())):
            for _ in range(self.updates_per_iteration if learning else 0):
                self._optimize(learning, measured)
        if learning:
            self.step_schedule()
        return summed_up(measured) | {"policy/nonfinite_skipped": float(self.nonfinite_steps)}

    def _optimize(self, learning: list[str], measured: Measured) -> None:
        """Take one optimizer step, for all agents on the same steps; targets follow it."""
        rows = self.buffer.sample(self.batch_size // world_size()).to(self.device)
        losses = []
        for name in learning:
            agent: Any = self.agents[name]
            steps = Transitions.of(rows, name, agent.action)
            loss, metrics = self.loss(agent, self.targets[name], steps)
            losses.append(loss.mean() / world_size())  # gradients are summed over ranks
            add(measured, self.named(name, {k: v.flatten() for k, v in metrics.items()}))
        self.step(torch.stack(losses).sum(), learning, measured)
        self.updates += 1
        for name in learning:
            agent = self.agents[name]
            self.target_update(self.targets[name], self.valuing(agent), int(self.updates))
