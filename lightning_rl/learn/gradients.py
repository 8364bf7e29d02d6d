"""The gradient of a minibatch, pack by pack, in as much memory as there is; none that is NaN."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_rl.data.packing import empty_like, select, split_packs, with_host
from lightning_rl.models.memory import smaller_budget
from lightning_rl.models.policy import Policy
from lightning_rl.models.sharding import full_tensor
from lightning_rl.run.dist import all_reduce_max, any_rank, rank

_log = logging.getLogger(__name__)

PackLoss = Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]


class FiniteSteps(LightningModule):
    """A module whose optimizer steps are left out where the gradient is NaN or infinite.

    On all ranks alike. Weights and the optimizer's state stay as if the batch had never been; a NaN
    in the loss makes one in the gradient.
    """

    nonfinite_steps = 0
    """Steps left out since the module was built, or since it was set to 0."""
    _warned = False

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = full_tensor(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if not any_rank(not math.isfinite(float(norm))):
            return
        optimizer.zero_grad(set_to_none=True)  # an optimizer leaves such parameters alone
        self.nonfinite_steps += 1
        if not self._warned and rank() == 0:
            self._warned = True
            _log.warning(
                "the gradient is NaN or infinite: this optimizer step is left out, as all such are "
                "(policy/nonfinite_skipped counts them); look for extreme logprobs or advantages, "
                "or lower lr"
            )


def accumulate(
    module: LightningModule,
    policy: Policy,
    minibatch: TensorDict,
    max_tokens: int,
    pack_loss: PackLoss,
) -> list[dict[str, Tensor]]:
    """Leave the sum of all packs' gradients in ``policy``; returns the packs' metrics.

    When a pack does not fit into memory, all is done again with packs of half its size.

    Args:
        module: whose backward pass it is.
        policy: whose gradients are cleared first.
        minibatch: packed rollouts.
        max_tokens: forward tokens of a pack.
        pack_loss: of a pack, its loss and metrics.

    Raises:
        PackMemoryError: if that does not help, or other ranks cannot take part.
    """
    policy.zero_grad()  # also of what a backward pass left that ran out of memory
    minibatch = with_host(minibatch)
    packs = split_packs(minibatch, max_tokens)
    count = int(all_reduce_max(len(packs)))  # sharded weights are gathered by all ranks together
    measured = []
    for place in range(count):
        pack = select(minibatch, packs[place]) if place < len(packs) else empty_like(minibatch)
        try:
            measured.append(_add_gradient(module, pack, pack_loss, last=place == count - 1))
        except RuntimeError as error:
            max_tokens = smaller_budget(pack, error)
            break  # out of here first: the error holds on to what was computed so far
    else:
        return measured
    return accumulate(module, policy, minibatch, max_tokens, pack_loss)


def _add_gradient(
    module: LightningModule, pack: TensorDict, pack_loss: PackLoss, last: bool
) -> dict[str, Tensor]:
    loss, metrics = pack_loss(pack)
    with nullcontext() if last else _without_averaging(module):
        module.manual_backward(loss)
    return metrics


def _without_averaging(module: LightningModule) -> AbstractContextManager[None]:
    """Under DDP, for all packs but the last: their gradients are averaged together with its."""
    strategy = module.trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext()
