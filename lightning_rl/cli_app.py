"""LightningCLI for RL: the Trainer with ``rollout``, and messages that name key, value and fix."""

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_rl.callbacks  # noqa: F401  (short class names work for what is imported)
import lightning_rl.data.reasoning_gym  # noqa: F401
import lightning_rl.schedulers  # noqa: F401
from lightning_rl.callbacks import RolloutWriter
from lightning_rl.datamodule import RLDataModule
from lightning_rl.module import PolicyModule
from lightning_rl.sft import SFTDataModule, SFTModule  # noqa: F401


class RLTrainer(Trainer):
    """Lightning's Trainer, plus collecting without training."""

    def rollout(
        self,
        model: PolicyModule,
        datamodule: RLDataModule,
        output: str,
        iterations: int = 1,
        ckpt_path: str | None = None,
    ) -> None:
        """Append graded rollouts to a JSONL file.

        Args:
            model: the policy.
            datamodule: prompts, engine and rewards.
            output: the file.
            iterations: how many batches of ``groups_per_iteration`` groups.
            ckpt_path: a checkpoint whose weights to use instead of the model's own.
        """
        datamodule.iterations_per_epoch = iterations
        writer = RolloutWriter(output)
        self.callbacks.append(writer)  # type: ignore[attr-defined]
        self.predict(model, datamodule=datamodule, ckpt_path=ckpt_path, return_predictions=False)
        print(f"{writer.written} rollouts appended to {output}")


class RLCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``rollout`` with any PolicyModule and data module."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=RLTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        names = LightningCLI.subcommands()
        kept = {name: names[name] for name in ("fit", "validate", "test")}
        return kept | {"rollout": {"model", "datamodule"}}
