"""OwnLoop: what a PolicyModule does in a script of one's own, without a Trainer."""

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
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.dist import every_rank
from lightning_rl.sync.base import WeightTransport, push
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights


class OwnLoop(RecordingModule, LearningModule, Learner):
    """``prepare``, ``fit`` and ``sync_weights``: one call per step, and no callback hears of it."""

    cast_lm_head_to_fp32: bool

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own_schedule: Any = None

    def prepare(self, fabric: Fabric | None = None) -> None:
        """Load the model, make optimizer and learning-rate schedule, move all to its device.

        Args:
            fabric: Lightning's, launched, for several processes (``FabricDDP``) or another
                precision; None: one process, on a GPU if there is one.

        Raises:
            ConfigError: if the module belongs to a Trainer, which does this itself; for a precision
                other than 32-true and bf16-mixed.
        """
        if self._trainer is not None:
            raise ConfigError(
                f"{type(self).__name__} belongs to a Trainer, which prepares it; use another one "
                "in a loop of your own"
            )
        fabric = fabric or Fabric(accelerator="auto", devices=1)
        precision = fabric._precision.precision
        if precision not in ("32-true", "bf16-mixed"):
            raise ConfigError(
                f"Fabric(precision={precision!r}): a loop of your own takes 32-true or bf16-mixed, "
                "and only a Trainer bf16-true"
            )
        self.configure_model()
        made: Any = self.configure_optimizers()
        if not isinstance(made, dict):
            made = {"optimizer": made}
        self._own_schedule = made.get("lr_scheduler")
        fabric.setup(self, made["optimizer"])

    def fit(self, batch: TensorDict | Sequence[Rollout]) -> dict[str, float]:
        """One iteration on graded rollouts, packed or not; returns its metrics.

        The first call prepares, unless you did.

        Raises:
            RewardError: if none of the rollouts can be trained on.
        """
        self._prepare_once()
        if not isinstance(batch, TensorDict):
            batch = pack_rollouts(trainable(list(batch)), among=batch)
        metrics = self.update(self.compute_all(batch.to(self.device)))
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
        """Push the present weights to an engine, as version ``iteration``, and compare.

        Args:
            engine: started.
            transport: how; connected already, and yours to close. None: in memory.
            probe: prompts for which the engine then writes two tokens, to compare logprobs.
            temperature: that the engine samples with.
            max_gap: in nats; None: what the dtypes of both allow, as in ``WeightSync``.
            digests: compare what the engine holds with what was sent, tensor by tensor.

        Returns:
            The largest gap in nats; 0 without ``probe``.

        Raises:
            ConfigError: if the module belongs to a Trainer, where ``WeightSync`` pushes.
            StaleWeightsError: if it is above ``max_gap``.
            WrongWeightsError: naming the tensor, if a digest differs.
            WeightSyncError: if the engine does not take the weights.
        """
        if self._trainer is not None:
            raise ConfigError(
                f"{type(self).__name__} belongs to a Trainer, in which the callback WeightSync "
                "pushes weights and stamps their version: tell it when by its schedule, e.g. "
                "WeightSync(schedule=FixedSchedule(1)), or by should_sync of a SyncSchedule of "
                "your own"
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
        """The Trainer's precision of a training step."""
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
            self.lr_schedulers().step()

    def lr_schedulers(self) -> Any:
        """The Trainer's, or that of :meth:`prepare`."""
        return super().lr_schedulers() if self._fabric is None else self._own_schedule


class FabricDDP(DDPStrategy):
    """DDP for ``Fabric(strategy=FabricDDP())`` around a ``PolicyModule``: each backward averages.

    Fabric's own averages gradients only if the forward pass goes through its wrapper, and the named
    steps do not: without a word, each rank would go its own way. Lightning's Trainer does the same
    for manual optimization.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        self._wrapper = super().setup_module(module)
        return self._wrapper

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        prepare_for_backward(self._wrapper, tensor)
        super().backward(tensor, module, *args, **kwargs)
