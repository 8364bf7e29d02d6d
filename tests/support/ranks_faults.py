"""Define what goes wrong on rank 1 alone, and a run that stops with a batch in hand."""

import math
import os
import random
import time
from typing import Any

import torch

from lightning_rl.callbacks import RLCallback
from lightning_rl.collect.collector import GroupFilter
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.errors import LightningRLError
from lightning_rl.run.processes import dist


class PoisonsRankOne(RLCallback):
    """Advantages that are NaN in the second iteration, on rank 1 alone."""

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if dist.rank() == 1 and pl_module.iteration == 1:
            batch["tokens", "advantages"][:] = math.nan


class NotOnRankOne(GroupFilter):
    """Rejects the first two groups that rank 1 sees; the others have no part in it."""

    def __init__(self) -> None:
        self.left = 2 * int(os.environ["RANK"])

    def keep(self, group: Any) -> bool:
        self.left -= 1
        return self.left < 0


def broken_on_rank_one(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    if dist.rank() == 1:
        raise RuntimeError("the grader is down")
    return [0.0 if i else 1.0 for i in range(len(completions))]


class BreaksOnRankOne(TransformersEngine):
    """Refuses the second push in the middle of it."""

    def load_weights(self, weights, version) -> None:
        if dist.rank() == 1 and version == 1:
            next(iter(weights))
            raise RuntimeError("out of memory")
        super().load_weights(weights, version)


class StaleOnRankOne(TransformersEngine):
    """Keeps its first weights, and says otherwise."""

    def load_weights(self, weights, version) -> None:
        if dist.rank() == 1 and version == 1:
            self.version = version
        else:
            super().load_weights(weights, version)


def raised_on_rank_one() -> None:
    """Raise on rank 1, while rank 0 waits for one that does not come."""
    if int(os.environ["RANK"]) == 1:
        raise RuntimeError("rank 1 has had enough")
    time.sleep(300)


def changed_state(number: int = 0) -> tuple[str, str | None, torch.dtype, int]:
    """Return the state of the process, then change it."""
    found = os.getcwd(), os.environ.get("LEFT"), torch.get_default_dtype(), random.getrandbits(32)
    os.chdir("/")
    os.environ["LEFT"] = "by an earlier function"
    torch.set_default_dtype(torch.float64)
    return found


class StopsWhenCollected(RLCallback):
    """Ends a run whose third batch is collected and graded, and not trained on."""

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        if pl_module.iteration == 2:
            raise LightningRLError("stopped")
