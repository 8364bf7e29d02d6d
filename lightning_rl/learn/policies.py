"""RolloutModule: the interface of all modules that train on rollouts, with one or more policies."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from tensordict import TensorDict
from torch.nn import Parameter
from transformers import PreTrainedTokenizerBase

from lightning_rl.config.lightning_flags import refuse_flags, warn_of_flags
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import RecordingModule
from lightning_rl.learn.frozen_base import left_out
from lightning_rl.learn.precision import use_our_precision
from lightning_rl.models.model_files import require_sound_model, save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Rollout


class RolloutModule(RecordingModule):
    """A module that trains one or more policies on the rollouts of an ``RLDataModule``."""

    @property
    @abstractmethod
    def policies(self) -> Mapping[str, Any]:
        """Each learning policy, a ``PolicyModule``, by name; the name of a single one is "".

        The ``iteration`` of each is the number of iterations in which it learned, which is its
        version.
        """

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, str]:
        """The name of the policy that plays each role; empty if a single policy plays all roles."""

    def written_by(self, name: str, batch: TensorDict) -> TensorDict:
        """Return the rows of a packed batch that a policy learns from."""
        return batch

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which all policies share."""
        return next(iter(self.policies.values())).loaded_policy.tokenizer

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer before the policies are loaded.

        Raises:
            ConfigError: if the policies' tokenizers differ.
        """
        first, *others = ((p.model, p.loading) for p in self.policies.values())
        tokenizer = load_tokenizer(*first)
        for other in others:
            if other != first and load_tokenizer(*other).get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"model={other[0]!r} has another vocabulary than model={first[0]!r}, but "
                    "policies that talk to each other must share one; use models of one family"
                )
        return tokenizer

    def require_sound_models(self) -> None:
        """Check that all models can be loaded, without keeping any in memory.

        Raises:
            ConfigError: naming the file, and what is wrong with it.
        """
        told = []
        for policy in self.policies.values():
            own = policy.model, policy.loading
            if own not in told:
                require_sound_model(*own)
                told.append(own)

    def save_skeletons(self, directory: str | Path) -> None:
        """Write configuration and tokenizer for an engine to start from, without weights.

        A policy whose model differs from the first one's gets its own, in a subdirectory of its
        name.
        """
        first, *_ = self.policies.values()
        save_skeleton(first.model, directory, first.loading)
        for name, policy in self.policies.items():
            if (policy.model, policy.loading.of_model) != (first.model, first.loading.of_model):
                save_skeleton(policy.model, Path(directory, name), policy.loading)

    def checkpointed_parameters(self) -> list[Parameter]:
        """Return the parameters that checkpoints hold: all but the frozen base of a LoRA."""
        base = {*left_out(self).values()}
        return [p for p in self.parameters() if p not in base]

    @property
    def role_versions(self) -> dict[str, int]:
        """The version of the policy that plays each role, by role."""
        return {role: self.policies[name].iteration for role, name in self.roles.items()}

    def check_trainer(self, trainer: Trainer) -> None:
        refuse_flags(trainer)

    def configure_callbacks(self) -> list[Callback]:
        callbacks = super().configure_callbacks()
        warn_of_flags(self.trainer)
        use_our_precision(self.trainer)
        return callbacks

    def predict_step(self, batch: list[Rollout], batch_idx: int) -> list[Rollout]:
        """Return the collected rollouts unchanged (``lightning-rl rollout``)."""
        return batch
