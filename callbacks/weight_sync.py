"""WeightSync: the engine samples from the weights that its version names."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.checks import check_sleep, check_sync
from lightning_rl.collect.collector import Collector
from lightning_rl.collect.prefetch import PrefetchingCollector
from lightning_rl.config.arguments import configurable
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.errors import ConfigError
from lightning_rl.learn.engine_kl import kl_from_engine, note_engine
from lightning_rl.learn.probe import probe_again, probe_gap, require_agreement
from lightning_rl.models.model_checks import require_finite_weights
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Prompt
from lightning_rl.run.hooks import call_hook, find_callbacks, is_fast_dev_run
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.processes.dist import all_reduce_max, any_rank, every_rank
from lightning_rl.sync.base import WeightTransport, compare, push
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule
from lightning_rl.sync.sent import SentWeights

STALE_AFTER = 16
"""Iterations without a push after which rollouts are called stale."""


@dataclass
class _Link:
    """A policy by its name, the engine that writes for it, and what carries its weights there.

    ``probe`` are prompts to verify with; ``sent``, digests of what was pushed, None without any;
    ``pushed``, the version that the engine was given last, -1 before; ``kl``, from those weights to
    the policy's, as measured after the last iteration, nan if it was not. ``measured`` is the batch
    on which it was, or will be if the next ones have no tokens of ``pushed``.
    """

    name: str
    policy: PolicyModule
    engine: Engine
    transport: WeightTransport
    probe: list[Prompt]
    sent: SentWeights | None
    pushed: int = -1
    kl: float = math.nan
    measured: TensorDict | None = None

    @property
    def behind(self) -> bool:
        """The policy has changed since."""
        return self.pushed != self.policy.iteration


@configurable
class WeightSync(RLCallback):
    """Pushes the policy's weights to the engine, stamps them with a version, and checks.

    A push happens before training (also before ``validate``, ``test`` and ``rollout``) and whenever
    the schedule says so. It is asked after each iteration, and on a single process again and again
    while the trainer waits for its next batch.

    After each push, before the engine goes on, a digest of each tensor that it holds is compared
    with that of what was sent. Then the engine has dropped its prefix cache, and a probe compares
    the logprobs of engine and trainer on tokens that the engine writes for real prompts. Between
    pushes, while the trainer trains, an engine with a ``sleep_level`` sleeps; if it wakes without a
    push, its weights are compared again.

    Of several policies the schedule is asked for each, and only those are pushed that have changed.

    Args:
        transport: how weights travel; None: in memory.
        schedule: when.
        max_gap: largest tolerated difference of logprobs in nats; None: 1e-3 where engine and
            trainer compute in float32, 0.25 where one of them has a 16-bit format. There a single
            token above it makes for a second probe, whose mean it bounds.
        probe_prompts: prompts in the probe, at least one for each replica; 0 switches it off.
        digests: compare each tensor by its digest, for a time like that of copying the weights.

    Raises:
        ConfigError: at start, if the transport cannot reach the engine, there is a second such
            callback, or the schedule leaves rollouts older than the collector allows.
        NonFiniteWeightsError: if the trainer's weights are NaN or infinite, before a push.
        WrongWeightsError: naming the process and the tensor, when a digest differs.
        StaleWeightsError: naming what was compared, the gap, its bound and the token, when the
            probe fails.
    """

    language_only = True

    def __init__(
        self,
        transport: WeightTransport | None = None,
        schedule: SyncSchedule = FixedSchedule(),
        max_gap: float | None = None,
        probe_prompts: int = 4,
        digests: bool = True,
    ) -> None:
        if max_gap is not None and not max_gap > 0:
            raise ConfigError(
                f"max_gap={max_gap} must be > 0 nats; null for the engine's tolerance"
            )
        if probe_prompts < 0:
            raise ConfigError(f"probe_prompts={probe_prompts} must be >= 0")
        self.transport = transport if transport is not None else MemoryTransport()
        self.schedule = schedule
        self.max_gap = max_gap
        self.probe_prompts = probe_prompts
        self.digests = digests
        self._links: dict[str, _Link] = {}  # by the policy's name
        self._asked = -1  # the iteration after which the schedule was asked last
        self._measures = False  # the schedule has asked for the KL
        self._records = True
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The engine may be another, and so may weights of the same version.
        self._links = {}
        datamodule, module = self.rl_data_of(trainer), self.rollout_module_of(pl_module)
        if stage == "fit":
            schedules = [sync.schedule for sync in find_callbacks(trainer, WeightSync)]
            check_sync(schedules, datamodule.collector)
            check_sleep(datamodule.engine.sleep_level, self.schedule, datamodule.collector)
        prompts = datamodule.train_prompts.first(self.probe_prompts)
        for name, policy in module.policies.items():
            engine = datamodule.engine.of_policy(name)
            transport = self.transport if not name else self.transport.for_policy(name)
            transport.use_scratch(is_fast_dev_run(trainer))
            transport.connect(engine)
            # Requests go to the replica with the fewest, so this many reach every one.
            count = max(len(prompts), engine.replica_count) if prompts else 0
            probe = list(islice(cycle(prompts), count))
            sent = SentWeights(module.clock) if self.digests else None
            self._links[name] = _Link(name, policy, engine, transport, probe, sent)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.transport.close()

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self._asked, "measures": self._measures}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._asked = state_dict["asked"]
        self._measures = state_dict.get("measures", False)

    # Not on_fit_start: sharded strategies restore checkpoints after it.
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run pushes to its new engine; an uninterrupted one did not push here.
        iteration = self.rollout_module_of(pl_module).iteration
        self._records = not trainer.ckpt_path or self._asked != iteration
        try:
            self.catch_up(trainer, pl_module)
        finally:
            self._records = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self.sync(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sync(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sync(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # The batch is collected; the push at its end wakes the engine.
        self.rl_data_of(trainer).engine.sleep()

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        # A collector that prefetches has written it with earlier weights than the engine has.
        for link in self._links.values():
            if self._measures and link.policy is pl_module and not link.behind:
                link.measured = batch.copy()
                link.measured["tokens"] = batch["tokens"].copy()
                with trainer.precision_plugin.forward_context():
                    note_engine(link.policy.learner, link.measured)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        datamodule, module = self.rl_data_of(trainer), self.rollout_module_of(pl_module)

        def measure(link: _Link) -> float:
            self._measures = True
            written = module.written_by(link.name, batch)
            with trainer.precision_plugin.forward_context():
                link.kl = kl_from_engine(link.policy.learner, written, link.pushed)
                if not math.isnan(link.kl):
                    link.measured = written
                elif link.measured is not None:
                    link.kl = kl_from_engine(link.policy.learner, link.measured, link.pushed)
            if not math.isnan(link.kl):
                self._record(link.policy, {"sync/kl": link.kl})
            return link.kl

        for link in self._links.values():
            link.kl = math.nan
        due = self._due(trainer, measure)
        self._asked = module.iteration
        if due:
            self._sync(trainer, pl_module, due)
        else:
            if datamodule.engine.sleep_level is not None:
                self._compare_awake()
            self._tell(datamodule.engine, self._asked)
            self._warn_if_stale(datamodule.collector)

    def on_collect_wait(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # No weights have changed since the iteration's end, and so neither has the KL.
        if due := self._due(trainer, lambda link: link.kl):
            self._sync(trainer, pl_module, due)

    def _warn_if_stale(self, collector: Collector) -> None:
        """Warn once if nothing but the schedule bounds how old the engine's weights are."""
        if self._warned or isinstance(collector, PrefetchingCollector):
            return
        behind = max(link.policy.iteration - link.pushed for link in self._links.values())
        if behind >= max(STALE_AFTER, 2 * self.schedule.least_updates):
            self._warned = True
            rank_zero_warn(
                f"WeightSync: schedule={self.schedule} has not asked for a push for {behind} "
                f"iterations, so rollouts are written with weights that are as much older, and "
                f"{type(collector).__name__} does not bound that; push more often, such as with "
                "`or state.updates >= 8` in should_sync, or use AsyncCollector, whose "
                "max_staleness bounds it"
            )

    def _due(self, trainer: Trainer, measure_kl: Callable[[_Link], float]) -> list[_Link]:
        """The links whose policies the schedule wants to be pushed now."""
        due, datamodule = [], self.rl_data_of(trainer)
        for link in self._links.values():
            if not link.behind:  # on all ranks
                continue
            # On a rank that drives no engine, that has no version.
            state = replace(
                datamodule.sync_state(link.policy.iteration, link.name),
                engine_version=link.pushed,
                measure_kl=partial(measure_kl, link),
            )
            # All ranks push together: as soon as one engine needs new weights.
            if any_rank(self.schedule.should_sync(state) and drives_engine(link.engine)):
                due.append(link)
        return due

    def catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sync, unless the engine has the present weights, without waiting for the schedule.

        Call it on all ranks, while no update is under way.
        """
        behind = [link for link in self._links.values() if link.behind]
        if behind:
            self._sync(trainer, pl_module, behind)

    def sync(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause, push, verify, resume; then tell the other callbacks. Of all policies."""
        self._sync(trainer, pl_module, list(self._links.values()))

    def _sync(self, trainer: Trainer, pl_module: LightningModule, links: Sequence[_Link]) -> None:
        datamodule, module = self.rl_data_of(trainer), self.rollout_module_of(pl_module)
        call_hook(trainer, "on_sync_start")
        collector = datamodule.collection.collector
        with every_rank(), module.clock("generate"):
            run_async(collector.before_sync())
        with module.clock("sync"):
            for link in links:
                self._push(link)
                if link.probe:
                    self._verify(trainer, link)
        self._tell(datamodule.engine, module.iteration)
        run_async(collector.after_sync())
        call_hook(trainer, "on_weights_synced", module.iteration)

    def _compare_awake(self) -> None:
        """Verify the weights of engines that woke up without a new push."""
        with every_rank():
            for link in self._links.values():
                holds = link.engine.version >= 0 and drives_engine(link.engine)
                if link.sent is not None and holds:
                    compare(link.transport, link.engine, link.sent)

    def _push(self, link: _Link) -> None:
        begin, policy, version = time.perf_counter(), link.policy, link.policy.iteration
        require_finite_weights(policy.loaded_policy, f"pushed to the engine as version {version}")
        with every_rank():
            count = push(link.transport, link.engine, policy.loaded_policy, version, link.sent)
        link.pushed, link.measured = version, None
        row = {"sync/seconds": time.perf_counter() - begin, "sync/version": version}
        if link.sent is not None:
            # A rank that drives no engine compares nothing, and all ranks monitor the same.
            row["sync/tensors_compared"] = all_reduce_max(count)
        self._record(policy, row)

    def _record(self, module: PolicyModule, metrics: dict[str, float]) -> None:
        if self._records:
            module.record(metrics)

    def _tell(self, engine: Engine, iteration: int) -> None:
        if drives_engine(engine) and not any(link.behind for link in self._links.values()):
            engine.caught_up(iteration)

    def _verify(self, trainer: Trainer, link: _Link) -> None:
        sampling = self.rl_data_of(trainer).sampling
        compared = link.engine, link.policy.loaded_policy, link.probe, sampling.temperature
        # Prompts leave room for no more than that.
        tokens = min(2, sampling.max_tokens)
        with trainer.precision_plugin.forward_context():
            gap = probe_gap(*compared, tokens)
            self._record(
                link.policy,
                {
                    "sync/probe_gap": all_reduce_max(gap.value),
                    "sync/probe_gap_mean": all_reduce_max(gap.mean),
                },
            )
            require_agreement(
                gap,
                partial(probe_again, *compared),
                link.policy.iteration,
                self.max_gap,
                link.engine.precision,
                compute_dtype(trainer),
            )
