"""RolesModule: several policies that play different roles learn in one run."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import empty_like, select
from lightning_rl.errors import ConfigError
from lightning_rl.games.roles.role_policy import RolePolicy
from lightning_rl.learn.base import LanguageModule, save_primitive_hparams
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import load_lm, model_of, of_same_weights
from lightning_rl.run.processes.dist import any_rank


@configurable(model=model_of)
class RolesModule(RolloutModule, LanguageModule):
    """Trains several policies on the rollouts that they write together, each on its own rows.

    In an iteration, every policy whose schedule is due learns from the rows of its roles, as a
    :class:`PolicyModule` by itself would: with its own advantage, loss, optimizer and minibatches.
    LoRA policies of the same model share one base in memory and in checkpoints.

    Args:
        model: directory or hub name of the causal LM for policies that do not name one.
        policies: by name.

    Raises:
        ConfigError: if there is no policy, or if two of them play the same role.
    """

    def __init__(self, model: str, policies: dict[str, RolePolicy]) -> None:
        super().__init__()
        save_primitive_hparams(self)
        self.automatic_optimization = False
        self.model = model
        self._names = list(policies)
        self._learning = ""  # the name of the policy that is
        if not policies:
            raise ConfigError("RolesModule(policies={}) trains nothing; add at least one policy")
        schedulers = 0
        for index, (name, group) in enumerate(policies.items()):
            if not name.isidentifier() or hasattr(self, name):
                raise ConfigError(
                    f"RolesModule.policies: {name!r} cannot be a policy's name; use letters, "
                    "digits and _, and no name of an attribute of RolesModule"
                )
            group.join(self, name, model, (index, schedulers))
            schedulers += group.lr_scheduler is not None
            # Of itself, not in a list: Lightning tells its children whose trainer they have.
            self.add_module(name, group)
        _ = self.roles  # does everyone have their own?

    @property
    def policies(self) -> Mapping[str, RolePolicy]:
        return {name: getattr(self, name) for name in self._names}

    @property
    def roles(self) -> Mapping[str, str]:
        roles: dict[str, str] = {}
        for name, group in self.policies.items():
            for role in group.plays:
                if role in roles:
                    raise ConfigError(
                        f"RolesModule.policies: role {role!r} is played by both {roles[role]} and "
                        f"{name}; leave it to one of them"
                    )
                roles[role] = name
        return roles

    @property
    def learners(self) -> list[str]:
        return self._names

    # ---------------------------------------------------------------- set-up

    def check_trainer(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise ConfigError(
                f"RolesModule trains on one process, or on several that each hold all weights, not "
                f"with {type(strategy).__name__}; set trainer.strategy: ddp"
            )
        super().check_trainer(trainer)

    def configure_model(self) -> None:
        """Load all policies, once; policies that start from the same weights share one load."""
        read: list[tuple[tuple[Any, ...], PreTrainedModel]] = []
        for group in self.policies.values():
            if group.policy is None and (wanted := group.shared_base) is not None:
                base = next((lm for loaded, lm in read if loaded == wanted), None)
                if base is None:
                    base = load_lm(*wanted)
                    read.append((wanted, base))
                group.start_from(of_same_weights(base))
            group.configure_model()

    @property
    def loaded_policies(self) -> dict[str, Policy]:
        return {name: group.loaded_policy for name, group in self.policies.items()}

    def configure_optimizers(self) -> Any:
        made = [group.configure_optimizers() for group in self.policies.values()]
        both = [one if isinstance(one, dict) else {"optimizer": one} for one in made]
        schedulers = [one["lr_scheduler"] for one in both if "lr_scheduler" in one]
        return [one["optimizer"] for one in both], schedulers

    # ---------------------------------------------------------------- learning

    def rows_of(self, name: str, batch: TensorDict) -> Tensor:
        """Return the rows, (r,), of a policy's roles in a batch with roles numbered as in
        ``roles``.
        """
        own = [n for n, policy in enumerate(self.roles.values()) if policy == name]
        role = batch["rollouts", "role"].cpu()
        return torch.isin(role, torch.tensor(own, device="cpu")).nonzero().squeeze(1)

    def written_by(self, name: str, batch: TensorDict) -> TensorDict:
        rows = self.rows_of(name, batch)
        return select(batch, rows) if len(rows) else empty_like(batch)

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one RL iteration: update every policy that is due and has written anything."""
        self.require_packed(batch)
        for name, group in self.policies.items():
            rows = self.rows_of(name, batch)
            if not group.schedule.due(self.iteration) or not any_rank(len(rows) > 0):
                continue
            self._learning = name
            group.training_step(select(batch, rows), batch_idx)
            self.stopping, group.stopping = self.stopping or group.stopping, None
        self.iteration += 1

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.policies[self._learning].on_before_optimizer_step(optimizer)

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_rl"]["policies"] = {
            name: {"iteration": group.iteration, "parts": group.state_of_parts()}
            for name, group in self.policies.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        for name, group in self.policies.items():
            state = checkpoint["lightning_rl"]["policies"][name]
            group.iteration = state["iteration"]
            group.load_parts(state["parts"])
