"""OwnLoop: trains a PolicyModule in your own script, without a Trainer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.overrides.distributed import prepare_for_backward
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rl.collect.loader import trainable
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.base import Engine
from lightning_rl.errors import ConfigError
from lightning_rl.learn.backends import TorchBackend
from lightning_rl.learn.learner import Learner
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.probe import probe_again, probe_gap, require_agreement
from lightning_rl.learn.schedulers import step_plateaus
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.processes.dist import every_rank
from lightning_rl.sync.base import WeightTransport, push
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights


class FabricBackend(TorchBackend):
    """Computes with Lightning Fabric, on one process or several (``FabricDDP``).

    Args:
        fabric: a launched Fabric.
        optimizer: an optimizer that it has set up.
        lr_scheduler: stepped once per optimizer step; None: none.
    """

    def __init__(self, fabric: Fabric, optimizer: Any, lr_scheduler: Any = None) -> None:
        super().__init__(optimizer, lr_scheduler)
        self._fabric = fabric

    @property
    def device(self) -> torch.device:
        return self._fabric.device

    def autocast(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._fabric.autocast()
        return context

    def backward(self, loss: Tensor, last: bool) -> None:
        self._fabric.backward(loss)


class OwnLoop:
    """Trains a ``PolicyModule`` in your own script: one call per step, without any callbacks.

    It loads the model, creates the optimizer and learning-rate schedule, and moves all to the
    device. The named steps of an iteration are those of ``module.learner``.

    Args:
        module: a ``PolicyModule``.
        fabric: a launched Lightning ``Fabric``, for several processes (``FabricDDP``) or another
            precision; None: one process, on a GPU if there is one.

    Raises:
        ConfigError: if the module belongs to a Trainer; for a precision other than 32-true and
            bf16-mixed.
    """

    def __init__(self, module: RolloutModule, fabric: Fabric | None = None) -> None:
        if module._trainer is not None:
            raise ConfigError(
                f"{type(module).__name__} belongs to a Trainer, which prepares it, and in which "
                "the callback WeightSync pushes its weights; use another one in your own loop"
            )
        fabric = fabric or Fabric(accelerator="auto", devices=1)
        precision = fabric._precision.precision
        if precision not in ("32-true", "bf16-mixed"):
            raise ConfigError(
                f"Fabric(precision={precision!r}): your own loop supports 32-true and bf16-mixed; "
                "use a Trainer for bf16-true"
            )
        module.configure_model()
        made: Any = module.configure_optimizers()
        if not isinstance(made, dict):
            made = {"optimizer": made}
        _, optimizer = fabric.setup(module, made["optimizer"])
        self._schedule = made.get("lr_scheduler")
        self._computes_in = "bfloat16" if precision == "bf16-mixed" else "float32"
        self.module = module
        self.learner: Learner = module.policies[""].learner
        """The module's learner."""
        self.learner.backend = FabricBackend(fabric, optimizer, self._schedule)

    def fit(self, batch: TensorDict | Sequence[Rollout]) -> dict[str, float]:
        """Train one iteration on graded rollouts, packed or not; return its metrics.

        Raises:
            RewardError: if none of the rollouts can be trained on.
        """
        if not isinstance(batch, TensorDict):
            batch = pack_rollouts(trainable(list(batch)), among=batch)
        metrics = self.learner.step(batch)
        step_plateaus([self._schedule], metrics)
        return metrics

    def sync_weights(
        self,
        engine: Engine,
        transport: WeightTransport | None = None,
        probe: Sequence[Prompt] = (),
        temperature: float = 1.0,
        max_gap: float | None = None,
        digests: bool = True,
    ) -> float:
        """Push the current weights to an engine, as version ``iteration``, and compare logprobs.

        Args:
            engine: the engine; already started.
            transport: moves the weights; you connect and close it. None: in memory.
            probe: prompts for which the engine then generates two tokens, to compare logprobs.
            temperature: the engine's sampling temperature.
            max_gap: largest gap allowed, in nats; None: depends on the dtypes of both, as in
                ``WeightSync``.
            digests: compare the engine's weights with those sent, tensor by tensor.

        Returns:
            The largest gap in nats; 0 without ``probe``.

        Raises:
            StaleWeightsError: if the gap is above ``max_gap``.
            WrongWeightsError: naming the tensor, if a digest differs.
            WeightSyncError: if the engine does not accept the weights.
        """
        if transport is not None:
            self._push(engine, transport, digests)
        else:
            transport = MemoryTransport()
            transport.connect(engine)
            try:
                self._push(engine, transport, digests)
            finally:
                transport.close()
        if not probe:
            return 0.0
        with self.learner.backend.autocast():
            compared = engine, self.learner.policy, list(probe), temperature
            gap = probe_gap(*compared)
            require_agreement(
                gap,
                partial(probe_again, *compared),
                self.learner.iteration,
                max_gap,
                engine.precision,
                self._computes_in,
            )
        return gap.value

    def _push(self, engine: Engine, transport: WeightTransport, digests: bool) -> None:
        sent = SentWeights() if digests else None
        with every_rank():
            push(transport, engine, self.learner.policy, self.learner.iteration, sent)


class FabricDDP(DDPStrategy):
    """DDP for ``Fabric(strategy=FabricDDP())`` with a ``PolicyModule``: every backward averages.

    Fabric's own DDP averages gradients only if the forward pass goes through its wrapper, which the
    named steps do not do: each rank would silently diverge. Lightning's Trainer uses the same
    method for manual optimization.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        self._wrapper = super().setup_module(module)
        return self._wrapper

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        prepare_for_backward(self._wrapper, tensor)
        super().backward(tensor, module, *args, **kwargs)
