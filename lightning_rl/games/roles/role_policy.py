"""RolePolicy: the roles that one policy plays, and its learning settings."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.learn.backends import Backend
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.trainer_backend import TrainerBackend
from lightning_rl.learn.update_schedules import EveryIteration, UpdateSchedule
from lightning_rl.models.lora import as_lora
from lightning_rl.models.pretrained import model_of
from lightning_rl.module import PolicyModule
from lightning_rl.run.files.metrics import named
from lightning_rl.run.processes.dist import all_max, sum_over_ranks, world_size


@configurable(model=model_of, lora=as_lora)
class RolePolicy(PolicyModule):
    """One of the policies of a :class:`RolesModule`: it plays some roles, and learns from their
    rows.

    It learns like a :class:`PolicyModule` that gets only the rows of its roles; its further
    settings are that module's. Its metrics have its name in theirs: ``policy/prover/loss``.

    Args:
        roles: the roles that it plays; None: the one of its own name.
        model: directory or hub name of the causal LM to train; None: that of the ``RolesModule``.
        schedule: the iterations in which it learns; in others it plays and keeps its version.
    """

    def __init__(
        self,
        roles: list[str] | None = None,
        model: str | None = None,
        schedule: UpdateSchedule = EveryIteration(),
        **settings: Any,
    ) -> None:
        super().__init__(model or "", **settings)
        self._roles = roles
        self.schedule = schedule
        self._places = (0, 0)
        self._base: tuple[PreTrainedModel | None] = (None,)  # hidden from nn.Module

    def join(self, run: RecordingModule, name: str, model: str, places: tuple[int, int]) -> None:
        """Become a policy of a run.

        Args:
            run: the module of the run, whose clock all policies use.
            name: the name of this policy.
            model: the model to use if this policy does not name one.
            places: indices of its optimizer and its learning-rate schedule among the run's.
        """
        self.name, self._places, self.clock = name, places, run.clock
        self.model = self.model or model

    @property
    def plays(self) -> list[str]:
        """The roles that it plays."""
        return [self.name] if self._roles is None else self._roles

    # ---------------------------------------------------------------- what it shares

    @property
    def shared_base(self) -> tuple[Any, ...] | None:
        """How to load its base weights, if they never change; None: others cannot share them."""
        if self.lora is None or self.lora.trains_base:
            return None
        # What is set up after loading is each policy's own.
        loading = replace(self.loading, gradient_checkpointing=False, cast_lm_head_to_fp32=False)
        return self.model, loading, self.lora.quantization

    def start_from(self, lm: PreTrainedModel) -> None:
        """Use a causal LM that was loaded already; call it before ``configure_model``."""
        self._base = (lm,)

    def own_lm(self) -> PreTrainedModel | None:
        return self._base[0]

    # ---------------------------------------------------------------- its part of the run

    def configure_callbacks(self) -> list[Callback]:
        raise ConfigError(
            "RolePolicy cannot train alone; add it to RolesModule.policies, or use PolicyModule"
        )

    def make_backend(self) -> Backend:
        return _GroupBackend(self, *self._places)

    @property
    def recorded(self) -> dict[str, float]:
        """The run's metrics, and its own without the policy's name in theirs."""
        everything, mine = self._run.recorded, f"/{self.name}/"
        own = {n.replace(mine, "/", 1): v for n, v in everything.items() if mine in n}
        return everything | own

    def record(self, metrics: dict[str, float]) -> None:
        self._run.record({named(metric, self.name): value for metric, value in metrics.items()})

    @property
    def _run(self) -> RecordingModule:
        run = self.trainer.lightning_module
        assert isinstance(run, RecordingModule)
        return run


class _GroupBackend(TrainerBackend):
    """The Trainer's, for one policy of several."""

    def backward(self, loss: Tensor, last: bool) -> None:
        # DDP's own reduction would wait for the weights of all policies.
        super().backward(loss, last=False)
        if last:
            _average_over_ranks(self.module.loaded_policy.parameters())


def _average_over_ranks(parameters: Iterable[Parameter]) -> None:
    """Average gradients over ranks; a missing one counts as zero, unless all ranks lack it."""
    if world_size() == 1:
        return
    trained = [p for p in parameters if p.requires_grad]
    there = all_max(torch.tensor([float(p.grad is not None) for p in trained], device="cpu"))
    gradients = []
    for parameter in compress(trained, there.tolist()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    sum_over_ranks(gradients)
    torch._foreach_div_(gradients, world_size())
