"""RLProgressBar: iteration, reward, accuracy, speed, and what is going on right now."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_rl.arguments import configurable
from lightning_rl.hooks import RLCallback
from lightning_rl.module import PolicyModule

SHOWN = {
    "reward/mean": "reward",
    "eval/accuracy": "accuracy",
    "rollout/tokens_per_s": "tok/s",
}


@configurable
class RLProgressBar(TQDMProgressBar, RLCallback):
    """Lightning's bar, in RL's terms; one step of it is one iteration.

    Args:
        refresh_rate: iterations between two redraws; 0 switches the bar off.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert isinstance(pl_module, PolicyModule)
        self._metrics: dict[str, Any] = {}
        pl_module.clock.listeners.append(self._show_stage)

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """``v_num`` and the few figures that tell how it goes."""
        known = trainer.callback_metrics
        shown = {
            label: f"{float(known[name]):.3g}" for name, label in SHOWN.items() if name in known
        }
        self._metrics = super().get_metrics(trainer, pl_module) | shown
        return self._metrics

    def _show_stage(self, stage: str) -> None:
        if self.is_enabled and self._train_progress_bar is not None:
            self.train_progress_bar.set_postfix(self._metrics | {"stage": stage})
