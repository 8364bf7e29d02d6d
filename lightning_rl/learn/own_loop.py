"""OwnLoop: lets a PolicyModule train in your own script, without a Trainer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rl.collect.loader import trainable
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.base import Engine
from lightning_rl.errors import ConfigError
from lightning_rl.learn.base import LearningModule, RecordingModule
from lightning_rl.learn.learner import Learner
from lightning_rl.learn.probe import probe_again, probe_gap, require_agreement
from lightning_rl.learn.schedulers import step_plateaus, step_scheduler
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.processes.dist import every_rank
from lightning_rl.sync.base import WeightTransport, push
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights


class OwnLoop(RecordingModule, LearningModule, Learner):
    """Adds ``prepare``, ``fit`` and ``sync_weights``: one call per step, without any callbacks."""

    cast_lm_head_to_fp32: bool

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own_schedule: Any = None

    def prepare(self, fabric: Fabric | None = None) -> None:
        """Load the model, create the optimizer and learning-rate schedule, and move all to the
        device.

        Args:
            fabric: a launched Lightning ``Fabric``, for several processes (``FabricDDP``) or
                another precision; None: one process, on a GPU if there is one.

        Raises:
            ConfigError: if the module belongs to a Trainer, which does this itself; for a precision
                other than 32-true and bf16-mixed.
        """
        if self._trainer is not None:
            raise ConfigError(
                f"{type(self).__name__} belongs to a Trainer, which prepares it; use another one "
                "in your own loop"
            )
        fabric = fabric or Fabric(accelerator="auto", devices=1)
        precision = fabric._precision.precision
        if precision not in ("32-true", "bf16-mixed"):
            raise ConfigError(
                f"Fabric(precision={precision!r}): your own loop supports 32-true and bf16-mixed; "
                "use a Trainer for bf16-true"
            )
        self.configure_model()
        made: Any = self.configure_optimizers()
        if not isinstance(made, dict):
            made = {"optimizer": made}
        self._own_schedule = made.get("lr_scheduler")
        fabric.setup(self, made["optimizer"])

    def fit(self, batch: TensorDict | Sequence[Rollout]) -> dict[str, float]:
        """Train one iteration on graded rollouts, packed or not; return its metrics.

        The first call also calls ``prepare``, unless you did.

        Raises:
            RewardError: if none of the rollouts can be trained on.
        """
        self._prepare_once()
        if not isinstance(batch, TensorDict):
            batch = pack_rollouts(trainable(list(batch)), among=batch)
        metrics = self.update(self.compute_all(batch.to(self.device)))
        step_plateaus([self._own_schedule], metrics)
        self.end_iteration(metrics)
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
            ConfigError: if the module belongs to a Trainer, where ``WeightSync`` pushes.
            StaleWeightsError: if the gap is above ``max_gap``.
            WrongWeightsError: naming the tensor, if a digest differs.
            WeightSyncError: if the engine does not accept the weights.
        """
        if self._trainer is not None:
            raise ConfigError(
                f"{type(self).__name__} belongs to a Trainer, in which the callback WeightSync "
                "pushes weights and sets their version; choose when with its schedule, e.g. "
                "WeightSync(schedule=FixedSchedule(1)), or override should_sync of a SyncSchedule"
            )
        self._prepare_once()
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
        assert self._fabric is not None
        with self._fabric.autocast():
            compared = engine, self.loaded_policy, list(probe), temperature
            gap = probe_gap(*compared)
            mixed = self._fabric._precision.precision == "bf16-mixed"
            require_agreement(
                gap,
                partial(probe_again, *compared),
                self.iteration,
                max_gap,
                engine.precision,
                "bfloat16" if mixed else "float32",
            )
        return gap.value

    def _prepare_once(self) -> None:
        if self._fabric is None:
            self.prepare()

    def _push(self, engine: Engine, transport: WeightTransport, digests: bool) -> None:
        sent = SentWeights() if digests else None
        with every_rank():
            push(transport, engine, self.loaded_policy, self.iteration, sent)

    def step_precision(self) -> AbstractContextManager[object]:
        """Return the Trainer's precision context of a training step."""
        if self._trainer is None:
            return nullcontext()
        context: AbstractContextManager[object] = self.trainer.precision_plugin.train_step_context()
        return context

    def own_optimizer(self) -> Any:
        return self.optimizers()  # one, so not a list

    def add_gradient(self, loss: Tensor, last: bool) -> None:
        strategy: Any = self.trainer.strategy
        blocks = isinstance(strategy, TrainerDDP) and not last
        with strategy.block_backward_sync() if blocks else nullcontext():
            self.manual_backward(loss)

    def take_step(self) -> None:
        optimizer = self.own_optimizer()
        if self._trainer is None:  # a Trainer calls this hook within the step
            self.on_before_optimizer_step(optimizer)
        optimizer.step()
        if self.lr_scheduler is not None:
            step_scheduler(self.lr_schedulers())

    def lr_schedulers(self) -> Any:
        """Return the Trainer's schedules, or the one created by :meth:`prepare`."""
        return super().lr_schedulers() if self._fabric is None else self._own_schedule


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
