"""An agent that is no language model: a walk of one weight, whose reward is the weight itself."""

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.config.lightning_flags import refuse_flags
from lightning_rl.learn.base import RecordingModule
from lightning_rl.run.files.resume import enter_directory, leave_directory
from lightning_rl.run.hooks import default_callbacks


class Walker(RecordingModule):
    """Grows its weight by ``lr`` in each iteration."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.weight = nn.Parameter(torch.zeros(1))

    def configure_callbacks(self) -> list[Callback]:
        refuse_flags(self.trainer)
        return default_callbacks(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.clock("train"):
            self.manual_backward(-self.weight.sum())
            optimizer.step()
        self.iteration += 1
        self.record({"reward/mean": float(batch), "policy/loss": -float(batch)})


class Walks(CollectingDataModule):
    """Walks three iterations an epoch; ``starts`` and ``evaluations`` count what was done."""

    nothing_to_evaluate = "set data.held_out"

    def __init__(self, held_out: int = 1) -> None:
        super().__init__()
        self.held_out = held_out
        self.starts = self.evaluations = 0

    @property
    def evaluates(self) -> bool:
        return self.held_out > 0

    def setup(self, stage: str) -> None:
        enter_directory(self.trainer)
        self.starts += 1

    def teardown(self, stage: str) -> None:
        leave_directory(self.trainer)

    def train_dataloader(self) -> LazyLoader:
        return LazyLoader(lambda _: self.walker.weight.detach().clone(), 3)

    def evaluate(self) -> tuple[list[float], dict[str, float]]:
        self.evaluations += 1
        reward = float(self.walker.weight.detach())
        return [reward], {"eval/reward_mean": reward}

    @property
    def walker(self) -> Walker:
        return self.trainer.lightning_module
