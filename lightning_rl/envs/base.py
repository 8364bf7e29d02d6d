"""EnvModule: what modules that learn in environments have in common."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DDPStrategy
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.config.lightning_flags import refuse_flags, warn_of_flags
from lightning_rl.envs.networks.agent import EnvAgent
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.schedulers import make_scheduler, step_scheduler
from lightning_rl.run.files.metrics import named
from lightning_rl.run.hooks import answers, datamodule_of, skip_profiling
from lightning_rl.run.processes.dist import sum_over_ranks
from lightning_rl.run.token_metrics import TokenMetrics

Measured = dict[str, list[Tensor]]
"""Per-step metrics (M,) by name; averaging them all at once is faster than one by one."""


def add(measured: Measured, metrics: Mapping[str, Tensor]) -> None:
    """Append the metrics of a step."""
    for name, values in metrics.items():
        measured[name].append(values)


def summed_up(measured: Measured) -> dict[str, float]:
    """Return means, and maxima, over all steps and ranks."""
    metrics = TokenMetrics()
    metrics.add({name: torch.cat(parts) for name, parts in measured.items()})
    return metrics.compute()


class EnvModule(RecordingModule):
    """Base class: builds agents for the data module's environment, and takes optimizer steps."""

    given_agents: Mapping[str, EnvAgent]
    optimizer: OptimizerCallable
    lr_scheduler: LRSchedulerCallable | None
    max_grad_norm: float | None
    compile_agents: bool

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, list[list[nn.Parameter]]] = {}
        self.agents: Mapping[str, EnvAgent] = cast(Any, nn.ModuleDict())

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes each hook's name, 200 times in a short iteration, and torch would look up
        # every time whether that is a parameter, a module or a buffer.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def described_as(self) -> str:
        """How a report names the model."""
        return ", ".join(f"{name}: {type(a.body).__name__}" for name, a in self.agents.items())

    def planned(self, frames: int) -> list[str]:
        """Describe what an iteration of ``frames`` steps will do; [] if that is not known
        beforehand.
        """
        return []

    # ---------------------------------------------------------------- set-up

    def check_trainer(self, trainer: Trainer) -> None:
        refuse_flags(trainer)
        if trainer.precision == "bf16-true":
            raise ConfigError(
                "trainer.precision='bf16-true': the weights of bodies and heads are small, and "
                "kept in float32; use bf16-mixed"
            )

    def configure_callbacks(self) -> list[Callback]:
        callbacks = super().configure_callbacks()
        warn_of_flags(self.trainer)
        skip_profiling(self.trainer)
        return callbacks

    def configure_model(self) -> None:
        """Build the agents for the environment's observations and actions, once.

        Raises:
            ConfigError: for an agent that the environment does not have, or that does not fit it.
        """
        if self.agents:
            return
        spaces = getattr(datamodule_of(self.trainer), "spaces", None)
        if spaces is None:
            raise ConfigError(
                f"{type(self).__name__} learns in environments, but the data module has none; use "
                "EnvDataModule"
            )
        unknown = [name for name in self.given_agents if name not in spaces]
        if unknown:
            raise ConfigError(
                f"model.agents: the environment has no agent {unknown[0]!r}; it has "
                f"{', '.join(spaces)}"
            )
        for name, space in spaces.items():
            agent = deepcopy(self.given_agents.get(name)) or self.default_agent(space)
            try:
                agent.build(space)
            except ConfigError as error:
                raise ConfigError(f"model.agents.{name}: {error}") from error
            cast(nn.ModuleDict, self.agents)[name] = agent
        self.check_agents()
        if self.compile_agents:
            for agent in self.agents.values():
                agent.compile()

    @abstractmethod
    def default_agent(self, space: Space) -> EnvAgent:
        """Return the agent of a group for which none was given."""

    @abstractmethod
    def check_agents(self) -> None:
        """Refuse agents that these settings cannot train."""

    def configure_optimizers(self) -> Any:
        groups = [
            group
            for name, agent in self.agents.items()
            for group in agent.parameter_groups(name, self.parts_of(name))
        ]
        factors = [group.pop("lr_factor") for group in groups]
        optimizer = self.optimizer(groups)
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = group["lr"] * factor
        if self.lr_scheduler is None:
            return optimizer
        scheduler = make_scheduler(self.lr_scheduler, optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # ---------------------------------------------------------------- steps

    def is_skipped(self, batch: TensorDict) -> bool:
        """Ask callbacks about the coming update; return True if one of them skips it.

        Raises:
            ConfigError: if one requests what only rollouts of language models support.
        """
        skip = False
        for decision in answers(self.trainer, "on_update_start", batch):
            if decision.mask is not None or decision.correction is not None:
                raise ConfigError(
                    "a callback's Decision(mask=...) and Decision(correction=...) are for rollouts "
                    "of language models; in environments use skip and stop"
                )
            skip = skip or decision.skip or decision.stop is not None
            self.stopping = self.stopping or decision.stop
        return skip

    def step(self, loss: Tensor, names: Iterable[str], measured: Measured) -> None:
        """Take one optimizer step, with gradients summed over ranks and clipped.

        The step is skipped if a gradient is NaN or infinite.
        """
        optimizer: Any = self.optimizers()  # one, so not a list
        optimizer.zero_grad()
        strategy: Any = self.trainer.strategy
        # Agents may pause, and DDP's own reduction waits for every parameter.
        alone = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if alone else nullcontext():
            self.manual_backward(loss)
        if not self._parts:  # to find them takes as long as to clip them
            self._parts = {name: self.clipped_parts(name) for name in self.agents}
        norms = []
        for part in (part for name in names for part in self._parts[name]):
            parameters = [p for p in part if p.grad is not None]
            if parameters:
                sum_over_ranks(p.grad for p in parameters if p.grad is not None)
                most = self.max_grad_norm or float("inf")
                norms.append(nn.utils.clip_grad_norm_(parameters, most, foreach=True))
        norm = torch.stack(norms).max()
        if not bool(norm.isfinite()):  # the same on all ranks, whose gradients are
            self.leave_out(optimizer)
            return
        add(measured, {"policy/grad_norm": norm.reshape(1)})
        optimizer.step()

    def parts_of(self, name: str) -> dict[str, list[nn.Parameter]]:
        """Return all parameters that an agent's loss trains, by purpose."""
        return self.agents[name].parts()

    def clipped_parts(self, name: str) -> list[list[nn.Parameter]]:
        """Split an agent's parameters into parts, each clipped by its own norm.

        Parts that share no weights are separate: a critic's large errors do not slow its actor.
        """
        return self.agents[name].separate_parts()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Do nothing: :meth:`step` has already checked the gradient."""

    def learning(self) -> list[str]:
        """Return the names of the agents that learn in this iteration."""
        return [name for name, a in self.agents.items() if a.schedule.due(self.iteration)]

    def step_schedule(self) -> None:
        """Advance the learning rate schedule, if there is one."""
        if self.lr_scheduler is not None:
            step_scheduler(self.lr_schedulers())

    @property
    def learners(self) -> list[str]:
        return list(self.agents) if len(self.agents) > 1 else []

    def named(self, name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Prefix an agent's metrics with its name if there are several agents."""
        if len(self.agents) == 1:
            return dict(metrics)
        return {named(key, name): value for key, value in metrics.items()}

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Count the iteration."""
        self.iteration += 1
