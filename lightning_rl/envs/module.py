"""ActorCriticModule: agents of bodies and heads that learn on policy, one batch per iteration."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algos.kl import EntropyBonus, beyond_target, check_target_kl
from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, ValueLoss, check_step_loss
from lightning_rl.algos.schedules import Schedule, schedule_of
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.algos.steps import StepAdvantage, StepGAE
from lightning_rl.envs.base import EnvModule, Measured, add, summed_up
from lightning_rl.envs.networks.actor_critic import ActorCritic, joint_entropy, joint_log_prob
from lightning_rl.envs.networks.distributions import ActionDistribution
from lightning_rl.envs.networks.memory import RecurrentBody
from lightning_rl.envs.networks.space import Space
from lightning_rl.envs.rows import Clips, Rows, minibatches, normalized, rows_of
from lightning_rl.envs.step_loss import JointLoss, Made, StepLoss
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.learn.update_schedules import EveryIteration
from lightning_rl.run.processes.dist import all_sum, any_rank
from lightning_rl.run.seeding import derived_generator, run_seed


@configurable
class ActorCriticModule(EnvModule):
    """Trains agents in environments on batches of steps: PPO, REINFORCE and variants between them.

    With several groups of agents, each learns from its own rewards, values and advantages (IPPO, de
    Witt et al. 2020); with ``Centralized`` critics it is MAPPO (Yu et al. 2022).

    Args:
        agents: by the environment's names for its groups; a group without an entry, and the agent
            of a single-agent environment, is an ``ActorCritic()``.
        loss: any policy loss that reads single steps only; or a ``StepLoss``, such as
            ``TorchRLLoss``, which also replaces ``value_loss`` and ``entropy``.
        advantage: how advantages are computed from rewards.
        value_loss: the critic's loss.
        entropy: entropy bonus; None for none.
        kl: weight of a penalty for leaving the policy that collected the batch, KL(old || new) per
            step: a number, or a schedule such as ``AdaptiveKL``; None for none.
        joint_loss: a loss of several agents' choices together; None: each learns by itself.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per iteration.
        epochs: passes over each batch.
        target_kl: make no further pass once a pass's mean ``kl_old``, of any agent, exceeds it;
            None: always make all passes.
        minibatches: optimizer steps per pass.
        clips: for bodies with a memory, the pieces of episodes that they are trained on.
        max_grad_norm: bound of each agent's gradient norm, separately for actor and critic unless
            they share a body; None: no clipping.
        clip_jointly: clip actor and critic by one norm, as torchrl's, Stable-Baselines3's and
            CleanRL's PPO do; large critic errors then slow the actor.
        normalize_minibatches: if ``advantage`` normalises, do so per minibatch, as these libraries
            do, instead of over the batch.
        compile: speed up agents with ``torch.compile``; the first iteration is slower.
        seed: seed of the order of steps; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range, or a loss that needs more than steps have.
    """

    agents: Mapping[str, ActorCritic]

    def __init__(
        self,
        agents: dict[str, ActorCritic] | None = None,
        loss: PolicyLoss | StepLoss = PPOClip(),
        advantage: StepAdvantage = StepGAE(),
        value_loss: ValueLoss = ValueLoss(),
        entropy: EntropyBonus | None = None,
        kl: float | Schedule | None = None,
        joint_loss: JointLoss | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=3e-4, eps=1e-5, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        epochs: int = 4,
        target_kl: float | None = None,
        minibatches: int = 4,
        clips: Clips | None = None,
        max_grad_norm: float | None = 0.5,
        clip_jointly: bool = False,
        normalize_minibatches: bool = False,
        compile: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, epochs=epochs, minibatches=minibatches)
        require_finite(max_grad_norm=max_grad_norm)
        check_target_kl(target_kl, epochs=epochs)
        _check_loss(loss, value_loss, entropy)
        save_primitive_hparams(self)
        self.automatic_optimization = False
        self.given_agents = agents or {}
        self.loss = loss
        self.advantage = advantage
        self.value_loss = value_loss
        self.entropy = entropy
        self.kl = None if kl is None else schedule_of(kl, "kl", low=0, measured="KL")
        self.joint_loss = joint_loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.epochs = epochs
        self.target_kl = target_kl
        self.minibatches = minibatches
        self.clips = clips
        self.max_grad_norm = max_grad_norm
        self.clip_jointly = clip_jointly
        self.normalize_minibatches = normalize_minibatches and advantage.normalize
        self.compile_agents = compile
        self.seed = run_seed(seed)

    def planned(self, frames: int) -> list[str]:
        rows = frames // self.minibatches
        return [f"{self.epochs * self.minibatches} optimizer steps on about {rows} frames each"]

    # ---------------------------------------------------------------- one iteration

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one iteration on a batch of steps: values and advantages, then the update."""
        learning = [] if self.is_skipped(batch) else self.learning()
        with self.clock("train"):
            rows: dict[str, Rows] = {}
            metrics: dict[str, float] = {}
            for name in learning:
                own, measured = self.rows_of(name, batch)
                metrics |= self.named(name, measured)
                if any_rank(bool(own.learned["weights"].any())):
                    rows[name] = own
            metrics |= self.update(rows, tuple(batch.batch_size))
        self.end_iteration(metrics)
        self.record(metrics)

    def rows_of(self, name: str, batch: TensorDict) -> tuple[Rows, dict[str, float]]:
        """Return all that an agent learns from in a batch, and its metrics."""
        advantage = self.advantage
        if self.normalize_minibatches:
            advantage = replace(advantage, normalize=False)
        return rows_of(self.agents[name], name, batch, advantage)

    def update(self, rows: Mapping[str, Rows], shape: tuple[int, int]) -> dict[str, float]:
        """Optimise over epochs x minibatches on all agents' rows; return metrics.

        ``shape``: environments and steps of the batch.
        """
        measured: Measured = defaultdict(list)
        self.nonfinite_steps = 0
        old = {name: self._old(name, own) for name, own in rows.items()}
        passes = 0
        for epoch in range(self.epochs if rows else 0):
            order = derived_generator(self.seed, self.iteration, epoch)
            of_pass: Measured = defaultdict(list)
            for places in self.places(rows, shape, order):
                self._optimize(rows, places, old, of_pass)
            for name, values in of_pass.items():
                measured[name] += values
            passes += 1
            if self.target_kl is not None and beyond_target(self.target_kl, summed_up(of_pass)):
                break
        if rows:
            self.step_schedule()
        made = {"policy/nonfinite_skipped": float(self.nonfinite_steps)}
        if self.target_kl is not None:
            made["policy/passes"] = float(passes)
        return summed_up(measured) | made

    def places(
        self, rows: Mapping[str, Rows], shape: tuple[int, int], order: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield the indices (M,), of rows or clips, of each optimizer step of an epoch."""
        some = next(iter(rows.values()))
        return minibatches(some, self.minibatches, self.clips, shape, order)

    def _optimize(
        self,
        rows: Mapping[str, Rows],
        places: Tensor,
        old: Mapping[str, Made],
        measured: Measured,
    ) -> None:
        """Take one optimizer step on a minibatch of every agent's rows."""
        losses, made, drawn = [], {}, {}
        for name, all_rows in rows.items():
            some = all_rows.teaching(places)
            own = drawn[name] = self._drawn(name, all_rows, some)
            made[name], values = self.agents[name](own.observations, own.state, own.begins)
            loss, metrics = self._loss(made[name], values, own, old[name], some)
            losses.append(loss)
            add(measured, self.named(name, metrics))
        if self.joint_loss is not None and made.keys() >= set(self.joint_loss.agents):
            loss, metrics = self.joint_loss(made)
            weights = drawn[self.joint_loss.agents[0]].learned["weights"]
            losses.append((loss * weights).sum() / all_sum(weights.sum()).clamp(min=1))
            add(measured, {f"policy/{key}": v[weights > 0] for key, v in metrics.items()})
        self.step(torch.stack(losses).sum() if len(losses) > 1 else losses[0], rows, measured)

    def _drawn(self, name: str, rows: Rows, places: Tensor) -> Rows:
        if isinstance(self.agents[name].body, RecurrentBody):
            assert self.clips is not None
            return rows.clips(places, self.clips.length)
        return rows.at(places)

    def _loss(
        self, made: Made, values: Tensor, rows: Rows, old: Made, places: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return an agent's loss, scaled so that the ranks' sum is the mean over steps, and metrics
        (M,).
        """
        weights = rows.learned["weights"].flatten()
        share = weights / all_sum(weights.sum()).clamp(min=1)
        whole = self.loss if isinstance(self.loss, StepLoss) else self._own_loss
        loss, metrics = whole(made, values, rows)
        if self.kl is not None:
            moved = torch.stack([old[key].at(places).kl(d) for key, d in made.items()]).sum(0)
            moved = moved.flatten()
            metrics["policy/kl"] = moved.detach()
            loss = loss + self.kl.at(self.iteration) * moved
        live = weights > 0
        if not bool(live.all()):
            metrics = {key: value[live] for key, value in metrics.items()}
        return (loss * share).sum(), metrics

    def _own_loss(self, made: Made, values: Tensor, rows: Rows) -> tuple[Tensor, Metrics]:
        """Return the sum of policy, entropy and value loss, (M,), and metrics (M,)."""
        assert isinstance(self.loss, PolicyLoss)
        tokens: Any = {key: value.flatten() for key, value in rows.learned.items()}
        if self.normalize_minibatches:
            tokens["advantages"] = normalized(tokens["advantages"], tokens["weights"] > 0)
        loss, metrics = self.loss(joint_log_prob(made, rows.actions).flatten(), tokens)
        entropy = joint_entropy(made).flatten()
        metrics = {f"policy/{key}": value for key, value in metrics.items()}
        metrics |= {"policy/entropy": entropy.detach(), "policy/loss": loss.detach()}
        if self.entropy is not None:
            loss = loss - self.entropy.at(self.iteration) * entropy
        if self.advantage.needs_values:
            value_loss, of_values = self.value_loss(values.flatten(), tokens)
            metrics |= {f"value/{k.removeprefix('value_')}": v for k, v in of_values.items()}
            loss = loss + value_loss
        return loss, metrics

    def clipped_parts(self, name: str) -> list[list[nn.Parameter]]:
        """Return a single part if ``clip_jointly``."""
        parts = super().clipped_parts(name)
        return [[p for part in parts for p in part]] if self.clip_jointly else parts

    def _old(self, name: str, rows: Rows) -> dict[str, ActionDistribution]:
        """Return the agent's distributions before the update, if the loss needs them."""
        if self.kl is None:
            return {}
        with torch.no_grad():
            made, _ = self.agents[name](rows.observations)
        return made

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Count the iteration, and adapt the coefficients."""
        for name, coef in self._coefficients().items():
            if measured := [value for key, value in metrics.items() if key.endswith(f"/{name}")]:
                metrics[f"policy/{name}_coef"] = coef.at(self.iteration)
                coef.update(sum(measured) / len(measured))
        super().end_iteration(metrics)

    def _coefficients(self) -> dict[str, Schedule]:
        """Return the coefficients that may adapt, by the name of what they weigh."""
        found = {"kl": self.kl, "entropy": None if self.entropy is None else self.entropy.schedule}
        return {name: coef for name, coef in found.items() if coef is not None}

    def stateful_parts(self) -> dict[str, Any]:
        return self._coefficients()

    def default_agent(self, space: Space) -> ActorCritic:
        return ActorCritic()

    def check_agents(self) -> None:
        """Refuse agents that these settings cannot train.

        Raises:
            ConfigError: names agent and setting.
        """
        if self.joint_loss is not None:
            self._check_joint(self.joint_loss)
        for name, agent in self.agents.items():
            remembers = isinstance(agent.body, RecurrentBody)
            if remembers and self.clips is None:
                raise ConfigError(
                    f"agent {name!r} has a memory, {type(agent.body).__name__}, and is trained on "
                    "clips of episodes; set model.clips, e.g. Clips(length=16)"
                )
            if remembers and self.kl is not None:
                raise ConfigError(
                    f"agent {name!r} has a memory, which kl does not support; remove kl"
                )
            if self.clips is not None and not remembers:
                raise ConfigError(
                    f"model.clips are for bodies with a memory, but agent {name!r} has "
                    f"{type(agent.body).__name__}; remove clips, or give all agents such a body"
                )

    def _check_joint(self, joint: JointLoss) -> None:
        for name in joint.agents:
            if name not in self.agents or self.agents[name].schedule != EveryIteration():
                raise ConfigError(
                    f"joint_loss={type(joint).__name__} needs agents {', '.join(joint.agents)}, "
                    f"but {name!r} does not exist or does not learn in every iteration; remove "
                    "joint_loss, or that agent's schedule"
                )


def _check_loss(
    loss: PolicyLoss | StepLoss, value_loss: ValueLoss, entropy: EntropyBonus | None
) -> None:
    """Refuse a loss that needs more than steps have, or that replaces another given argument.

    Raises:
        ConfigError: names both.
    """
    if not isinstance(loss, StepLoss):
        check_step_loss(f"loss={type(loss).__name__}", loss)
        return
    given = "entropy" if entropy is not None else "value_loss"
    if entropy is not None or value_loss != ValueLoss():
        raise ConfigError(
            f"{given} cannot be combined with loss={type(loss).__name__}, which has its own; "
            f"remove {given}, and set the loss's arguments (entropy_coeff, critic_coeff) instead"
        )
