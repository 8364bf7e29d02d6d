"""HFExport: the policy as a directory that the rest of the world loads."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import LanguageModule
from lightning_rl.models.soundness import require_finite_weights
from lightning_rl.run.rundir import output_path


@configurable
class HFExport(RLCallback):
    """Writes the trained model for ``AutoModelForCausalLM.from_pretrained`` and vLLM's server.

    Of several policies each has a folder of its name.

    Args:
        directory: where to, except of a fast dev run; None: ``hf`` in the run directory.

    Raises:
        NonFiniteWeightsError: if the weights are NaN or infinite; what was there stays.
    """

    language_only = True

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, LanguageModule):
            raise ConfigError(f"HFExport: {type(pl_module).__name__} has no policy; remove it")
        for name, policy in pl_module.loaded_policies.items():
            target = self.target(trainer) / name
            require_finite_weights(policy, f"exported to {target}")
            policy.save_pretrained(target)  # on all ranks; the first writes

    def target(self, trainer: Trainer) -> Path:
        """The directory that is written; of several policies, that of their directories."""
        return output_path(trainer, self.directory, "hf")
