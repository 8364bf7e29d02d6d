"""DQNModule: learns values of n actions, and takes the best (Mnih et al. 2015)."""

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics
from lightning_rl.algos.schedules import LinearSchedule, Schedule, schedule_of
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.algos.td import HuberTD, TDLoss, greedy_value, td_target
from lightning_rl.envs.networks.q_agent import QAgent
from lightning_rl.envs.networks.targets import Polyak, TargetUpdate
from lightning_rl.envs.off_policy import OffPolicyModule
from lightning_rl.envs.transitions import TransitionBuffer, Transitions
from lightning_rl.learn.base import save_primitive_hparams


@configurable
class DQNModule(OffPolicyModule):
    """Trains agents that choose one of n actions, off policy, from single steps.

    Each iteration collects ``data.frames_per_iteration`` steps, preferably few, and makes
    ``updates_per_iteration`` updates on steps sampled from the buffer. In a group, each agent
    learns as if it were alone (independent Q-learning, Tan 1993). ``TorchRLEnv`` begins new
    episodes with every batch, so there a batch should be as long as an episode.

    Args:
        agents: by the environment's names for its groups; a group without an entry, and the agent
            of a single-agent environment, is a ``QAgent()``.
        buffer: the replay buffer.
        gamma: discount per step.
        double: the learning network chooses the action whose value the target network gives (van
            Hasselt et al. 2016); False: the target network does both.
        epsilon: share of random actions: a number, or a schedule over iterations.
        td_loss: loss of values and their targets.
        target_update: how the target network follows.
        warmup_frames: steps of random actions before learning starts.
        updates_per_iteration: optimizer steps after each batch.
        batch_size: steps sampled for each of them, on all ranks together.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per iteration of learning.
        max_grad_norm: bound of each agent's gradient norm; None: no clipping.
        seed: seed of the sampling; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    agent_class = QAgent

    def __init__(
        self,
        agents: dict[str, QAgent] | None = None,
        buffer: TransitionBuffer | None = None,
        gamma: float = 0.99,
        double: bool = True,
        epsilon: float | Schedule = LinearSchedule(start=1.0, final=0.05, iterations=100),
        td_loss: TDLoss = HuberTD(),
        target_update: TargetUpdate = Polyak(),
        warmup_frames: int = 1000,
        updates_per_iteration: int = 16,
        batch_size: int = 128,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 10.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            agents,
            buffer,
            gamma,
            target_update,
            warmup_frames,
            updates_per_iteration,
            batch_size,
            optimizer,
            lr_scheduler,
            max_grad_norm,
            seed,
        )
        save_primitive_hparams(self)
        self.double_q = double
        self.epsilon = schedule_of(epsilon, "epsilon", 0, 1)
        self.td_loss = td_loss

    def exploration(self, iteration: int) -> float:
        return self.epsilon.at(iteration)

    def valuing(self, agent: QAgent) -> nn.Module:
        return agent

    def loss(self, agent: Any, target: Any, steps: Transitions) -> tuple[Tensor, Metrics]:
        """Return the loss of the TD error."""
        index = steps.action.argmax(-1) if agent.one_hot else steps.action
        values = agent(steps.observations).gather(-1, index.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            after = target(steps.following)
            chooser = agent(steps.following) if self.double_q else after
            following = greedy_value(after, chooser)
            targets = td_target(steps.rewards, following, steps.terminated, self.gamma)
        loss = self.td_loss(values, targets)
        error = (values - targets).detach().abs()
        return loss, {"value/loss": loss, "value/mean": values, "value/td_error": error}
