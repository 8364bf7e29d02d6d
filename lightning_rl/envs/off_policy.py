"""OffPolicyModule: DQN and SAC, by torchrl's losses, target updaters and replay buffer."""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.base import EnvModule, Measured, add, summed_up
from lightning_rl.envs.collector import seeded
from lightning_rl.envs.maker import built_loss, require_installed
from lightning_rl.envs.networks.exploring import ExploringAgent
from lightning_rl.envs.networks.q_agent import QAgent
from lightning_rl.envs.networks.sac_agent import SACAgent
from lightning_rl.envs.networks.space import Continuous, Space
from lightning_rl.envs.replay import StepBuffer, single_steps
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.run.processes.dist import all_reduce_max, rank, world_size
from lightning_rl.run.seeding import derived_seed, run_seed

UPDATES = 2**31 + 1
"""Index for seeds of updates; different from every environment's."""


def loss_of(agent: ExploringAgent, gamma: float) -> Any:
    """Create torchrl's loss of an agent, whose target networks start as copies.

    Raises:
        ConfigError: for an argument that the loss does not take.
    """
    path, own = agent.torchrl_loss()
    loss = built_loss(path, own, agent.loss)
    loss.make_value_estimator(gamma=gamma)
    return loss


@configurable
class OffPolicyModule(EnvModule):
    """Trains agents on single steps from a replay buffer: DQN with ``QAgent``, SAC with
    ``SACAgent``.

    Each iteration collects ``data.frames_per_iteration`` steps, preferably few, and makes
    ``updates_per_iteration`` updates on steps sampled from the buffer. In a group, each agent
    learns as if it were alone (independent Q-learning, Tan 1993). ``TorchRLEnv`` begins new
    episodes with every batch, so there a batch should be as long as an episode. The buffer lies in
    main memory and in every checkpoint, so a resumed run is bit-equal to an uninterrupted one.

    Args:
        agents: by the environment's names for its groups; a group without an entry, and the agent
            of a single-agent environment, is a ``QAgent()``, or a ``SACAgent()`` if its actions are
            real numbers.
        gamma: discount per step.
        tau: share of the learning networks in each update of their target networks, which are
            moving averages (torchrl's ``SoftUpdate``); 1 copies them (``HardUpdate``).
        target_every: optimizer steps from one update of the target networks to the next.
        capacity: steps in each process's buffer; new ones replace the oldest.
        warmup_frames: steps of random actions before learning starts.
        updates_per_iteration: optimizer steps after each batch.
        batch_size: steps sampled for each of them, on all ranks together.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per iteration of learning.
        max_grad_norm: bound of the gradient norms of an agent, its critics and its temperature,
            each; None: no clipping.
        seed: seed of the sampling; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range, or if torchrl is not installed.
    """

    agents: Mapping[str, ExploringAgent]
    compile_agents = False
    updates: Tensor
    """Number of optimizer steps so far."""

    def __init__(
        self,
        agents: dict[str, ExploringAgent] | None = None,
        gamma: float = 0.99,
        tau: float = 0.005,
        target_every: int = 1,
        capacity: int = 100_000,
        warmup_frames: int = 1000,
        updates_per_iteration: int = 16,
        batch_size: int = 128,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 10.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        save_primitive_hparams(self)
        require_at_least(1, updates_per_iteration=updates_per_iteration, batch_size=batch_size)
        require_at_least(1, target_every=target_every, capacity=capacity)
        require_at_least(0, warmup_frames=warmup_frames)
        require_finite(max_grad_norm=max_grad_norm)
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma={gamma} must be in [0, 1]")
        if not 0 < tau <= 1:
            raise ConfigError(f"tau={tau} must be in (0, 1]")
        require_installed("torchrl", "OffPolicyModule")
        self.automatic_optimization = False
        self.given_agents = agents or {}
        self.buffer = StepBuffer(capacity)
        self.gamma = gamma
        self.tau = tau
        self.target_every = target_every
        self.warmup_frames = warmup_frames
        self.updates_per_iteration = updates_per_iteration
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.seed = run_seed(seed)
        self.losses: Mapping[str, Any] = cast(Any, nn.ModuleDict())
        """torchrl's loss of each agent, with its critics and target networks."""
        self._updaters: dict[str, Any] = {}
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    # ---------------------------------------------------------------- set-up

    def default_agent(self, space: Space) -> ExploringAgent:
        reals = isinstance(next(iter(space.actions.values())), Continuous)
        return SACAgent() if reals else QAgent()

    def configure_model(self) -> None:
        """Build the agents and their losses (once)."""
        super().configure_model()
        for name, agent in self.agents.items():
            if name not in self.losses:
                try:
                    cast(nn.ModuleDict, self.losses)[name] = loss_of(agent, self.gamma)
                except ConfigError as error:
                    raise ConfigError(f"model.agents.{name}: {error}") from error

    def check_agents(self) -> None:
        """Refuse agents and settings that do not work with single steps of earlier policies.

        Raises:
            ConfigError: names the agent, or the setting.
        """
        for name, agent in self.agents.items():
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

    def parts_of(self, name: str) -> dict[str, list[nn.Parameter]]:
        agent = self.agents[name]
        return agent.parts() | agent.further_parts(self.losses[name])

    def clipped_parts(self, name: str) -> list[list[nn.Parameter]]:
        agent = self.agents[name]
        return [*agent.separate_parts(), *agent.further_parts(self.losses[name]).values()]

    def stateful_parts(self) -> dict[str, Any]:
        return {"buffer": self.buffer}

    def on_train_start(self) -> None:
        super().on_train_start()
        for name, loss in self.losses.items():
            self._updaters[name] = self._updater(loss)
        self._explore()

    def _updater(self, loss: Any) -> Any:
        """Return what moves the target networks, which stay as they are until then."""
        from torchrl.objectives import HardUpdate, SoftUpdate

        # Created here, since it keeps the tensors, which move to the device after configure_model;
        # and it begins by copying the learning networks, which a resumed run must not do.
        state = {key: value.clone() for key, value in loss.state_dict().items()}
        with warnings.catch_warnings(action="ignore"):  # of a tau above 0.5
            if self.tau < 1:
                made = SoftUpdate(loss, tau=self.tau)
            else:
                made = HardUpdate(loss, value_network_update_interval=0)
        loss.load_state_dict(state)
        return made

    # ---------------------------------------------------------------- one iteration

    @property
    def frames(self) -> int:
        """Steps collected on all ranks, taking the rank with the fewest as the measure."""
        return -int(all_reduce_max(-self.buffer.added)) * world_size()

    @property
    def is_warm(self) -> bool:
        """Return True if the warm-up is over."""
        return self.frames >= self.warmup_frames

    def _explore(self) -> None:
        """Set the share of random actions of the next batch."""
        for agent in self.agents.values():
            agent.exploration = agent.explored_at(self.iteration) if self.is_warm else 1.0

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one iteration: store the steps of the batch, and learn from sampled ones."""
        skipped = self.is_skipped(batch)
        metrics = {"policy/exploration": next(iter(self.agents.values())).exploration}
        with self.clock("train"):
            self.buffer.add(single_steps(batch, self.agents))
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
            found = self.losses[name](rows[name])
            losses += [value for key, value in found.items() if key.startswith("loss")]
            metrics = self.agents[name].measured(rows[name], found)
            add(measured, self.named(name, {k: v.reshape(1) for k, v in metrics.items()}))
        # Gradients are summed over ranks.
        self.step(torch.stack(losses).sum() / world_size(), learning, measured)
        self.updates += 1
        if int(self.updates) % self.target_every == 0:
            for name in learning:
                self._updaters[name].step()
