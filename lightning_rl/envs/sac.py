"""SACModule: soft actor-critic, for real-valued actions (Haarnoja et al. 2018b)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rl.algos.losses import Metrics
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.algos.td import SquaredTD, TDLoss, td_target
from lightning_rl.envs.networks.sac_agent import SACAgent
from lightning_rl.envs.networks.targets import Polyak, TargetUpdate
from lightning_rl.envs.off_policy import OffPolicyModule
from lightning_rl.envs.transitions import TransitionBuffer, Transitions
from lightning_rl.learn.base import save_primitive_hparams


@configurable
class SACModule(OffPolicyModule):
    """Trains agents with real-valued actions, off policy, from single steps.

    Each iteration collects ``data.frames_per_iteration`` steps, preferably few, and makes
    ``updates_per_iteration`` updates of critics, actor and temperature together, on steps drawn
    from the buffer. In a group of agents each learns as if it were alone. ``TorchRLEnv``
    begins new episodes with every batch, so there a batch should be as long as an episode.

    Args:
        agents: by the environment's names for its groups; a group without an entry, and the agent
            of a single-agent environment, is a ``SACAgent()``.
        buffer: the replay buffer.
        gamma: discount per step.
        td_loss: loss of the critics' values and their targets.
        target_update: how the target critics follow.
        warmup_frames: steps of random actions before learning starts.
        updates_per_iteration: optimizer steps after each batch.
        batch_size: steps sampled for each of them, on all ranks together.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per iteration of learning.
        max_grad_norm: bound of the gradient norms of actor, critics and temperature, each; None:
            no clipping.
        seed: seed of the sampling; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    agent_class = SACAgent

    def __init__(
        self,
        agents: dict[str, SACAgent] | None = None,
        buffer: TransitionBuffer | None = None,
        gamma: float = 0.99,
        td_loss: TDLoss = SquaredTD(),
        target_update: TargetUpdate = Polyak(),
        warmup_frames: int = 1000,
        updates_per_iteration: int = 8,
        batch_size: int = 256,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=3e-4, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = None,
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
        self.td_loss = td_loss

    def exploration(self, iteration: int) -> float:
        """Return 0: the policy itself is random."""
        return 0.0

    def valuing(self, agent: SACAgent) -> nn.Module:
        return agent.critics

    def loss(self, agent: Any, target: Any, steps: Transitions) -> tuple[Tensor, Metrics]:
        """Return the sum of three losses; each parameter gets a gradient from only one of them."""
        critic, values = self.critic_loss(agent, target, steps)
        made, log_prob = agent(steps.observations).rsample()
        actor = self.actor_loss(agent, steps, made, log_prob)
        temperature = self.temperature_loss(agent, log_prob)
        metrics = {
            "value/loss": critic,
            "value/mean": values,
            "policy/loss": actor,
            "policy/entropy": -log_prob,
            "policy/temperature": agent.log_temperature.exp().expand_as(log_prob),
        }
        return critic + actor + temperature, metrics

    def critic_loss(self, agent: Any, target: Any, steps: Transitions) -> tuple[Tensor, Tensor]:
        """Return both critics' loss, and the mean of their values, (M, *A) (eqs. 5 and 6)."""
        with torch.no_grad():
            action, log_prob = agent(steps.following).rsample()
            temperature = agent.log_temperature.exp()
            following = _least(target, steps.following, action) - temperature * log_prob
            targets = td_target(steps.rewards, following, steps.terminated, self.gamma)
        values = [critic(steps.observations, steps.action) for critic in agent.critics]
        losses = [self.td_loss(value, targets) for value in values]
        return torch.stack(losses).sum(0), torch.stack(values).mean(0)

    def actor_loss(self, agent: Any, steps: Transitions, made: Tensor, log_prob: Tensor) -> Tensor:
        """Return the policy loss, low for actions of high value and entropy, (M, *A) (eq. 7)."""
        with _constant(agent.critics):
            value = _least(agent.critics, steps.observations, made)
        return agent.log_temperature.exp().detach() * log_prob - value

    def temperature_loss(self, agent: Any, log_prob: Tensor) -> Tensor:
        """Return the loss that raises the temperature while entropy is below target, (M, *A) (eq.
        18).

        It uses log alpha instead of alpha, like the authors' own code.
        """
        return -agent.log_temperature * (log_prob.detach() + agent.target_entropy)


def _least(
    critics: Iterable[nn.Module], observations: Mapping[str, Tensor], action: Tensor
) -> Tensor:
    """Return the smaller of the critics' values (Fujimoto et al. 2018)."""
    return torch.stack([critic(observations, action) for critic in critics]).amin(0)


@contextmanager
def _constant(module: nn.Module) -> Iterator[None]:
    """Let gradients pass through a module without reaching its parameters."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
