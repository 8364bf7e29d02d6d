"""Run the library on the task of ``benchmarks.gpu.peers``, through ``Trainer.fit``."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from tensordict import TensorDict

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import settle
from benchmarks.gpu.made import trainer_of
from benchmarks.gpu.peers.task import EQUAL, LOT, Lines, Task, lot
from benchmarks.gpu.peers.watch import (
    Laps,
    PassedTokens,
    forbid_end,
    import_seconds,
    model_flops,
    peak_gib,
)
from benchmarks.support.task import KeptEngine
from lightning_rl import (
    JSONLPrompts,
    LoRA,
    PolicyModule,
    RLDataModule,
    Rollout,
    Sampling,
    StepTimer,
    TransformersEngine,
    UpdateSettings,
    WeightSync,
)
from lightning_rl.callbacks import RLCallback
from lightning_rl.engines.base import Engine

if torch.cuda.is_available():
    import vllm  # noqa: F401  (else it would be imported as the engine starts)

IMPORT_S = import_seconds()
STAGES_OF_VLLM = {
    "init_device": "device",
    "load_model": "model",
    "determine_available_memory": "profile and compile",
    "compile_or_warm_up_model": "warm up and capture",
}
"""Methods of vLLM's worker."""


def run(bench: Bench, side: str, **options: Any) -> None:
    """Run both kinds of completions, one after another, with one model and one engine."""
    task = Task(**options).on(bench)
    told = Lines(bench, side)
    laps = Laps(bench, IMPORT_S)
    seed_everything(0, verbose=False)
    given: dict[str, Any] = {}
    if task.max_tokens_per_micro_batch is not None:
        given["update"] = UpdateSettings(max_tokens_per_micro_batch=task.max_tokens_per_micro_batch)
    fused = bench.device == "cuda"
    module = PolicyModule(
        str(task.directory(bench) / "model"),
        optimizer=partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=fused),
        lora=LoRA(rank=16) if task.lora else None,
        **given,
    )
    engine: Engine = TransformersEngine()
    if bench.device == "cuda":
        engine = KeptEngine(
            max_model_len=task.max_model_len,
            gpu_memory_utilization=task.share,
            adapters="merged" if task.lora else None,  # as TRL sends it
        )
    in_vllm: dict[str, Any] = {}
    with _starting(module, engine, laps, in_vllm):
        clock = Clock(bench, told, LOT, laps, in_vllm)
        _fit(bench, task, module, engine, clock, task.iterations, task.longest)
    if task.equal_iterations:
        forbid_end(module.loaded_policy.lm)
        clock = Clock(bench, told, EQUAL)
        _fit(bench, task, module, engine, clock, task.equal_iterations, task.mean)


def _fit(
    bench: Bench,
    task: Task,
    module: PolicyModule,
    engine: Engine,
    clock: "Clock",
    iterations: int,
    max_tokens: int,
) -> None:
    data = RLDataModule(
        JSONLPrompts(str(task.directory(bench) / "train.jsonl")),
        rewards=[lots],
        engine=engine,
        sampling=Sampling(max_tokens=max_tokens),
        groups_per_iteration=task.groups,
        group_size=task.group_size,
        iterations_per_epoch=iterations,
    )
    precision = "bf16-mixed" if bench.device == "cuda" else "32-true"
    callbacks = [clock, WeightSync(), StepTimer()]
    trainer_of(bench, precision=precision, callbacks=callbacks).fit(module, datamodule=data)


def lots(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return a reward for each completion."""
    return [lot(completion) for completion in completions]


class Clock(RLCallback):
    """Tells a line per iteration, and after the first of a start where its seconds went."""

    def __init__(
        self,
        bench: Bench,
        told: Lines,
        phase: str,
        laps: Laps | None = None,
        in_vllm: dict[str, Any] | None = None,
    ) -> None:
        self.bench, self.told, self.phase, self.laps, self.in_vllm = (
            bench,
            told,
            phase,
            laps,
            in_vllm,
        )
        self.rollouts: list[Rollout] = []
        self.update_s = 0.0
        self._updating: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module = self.policy_module_of(pl_module)
        self.passed = PassedTokens(self.module.loaded_policy.lm)
        self._since = time.perf_counter()
        self._lap("set up")

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lap("first sync")

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.rollouts = rollouts
        self._lap("first collection")

    def on_update_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict
    ) -> None:
        settle(self.bench)
        self.passed.take()
        self._updating = time.perf_counter()

    def on_sync_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the update is over; the first push comes before there was any."""
        if self._updating is None:
            return
        settle(self.bench)
        self.update_s, self._updating = time.perf_counter() - self._updating, None
        self.count = self.passed.take()
        self._lap("first update")

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        if not self.rollouts:  # of the first push
            return
        settle(self.bench)
        now = time.perf_counter()
        written = [len(rollout.token_ids) for rollout in self.rollouts]
        flops = model_flops(self.module.loaded_policy.lm.config, self.count, self._groups(written))
        self.told.tell(
            phase=self.phase,
            wall_s=now - self._since,
            written=sum(written),
            longest=max(written),
            passed=self.count,
            update_s=self.update_s,
            flops=sum(flops.values()),
            peak_gib=peak_gib(self.bench),
            **{n: v for n, v in metrics.items() if n.startswith("time/") or n.endswith("gap/mean")},
        )
        self._since = now
        if self.laps is not None:
            self._lap("second sync")
            self.told.tell(start_s=self.laps.total, stages=self.laps.seconds, vllm=self.in_vllm)
            self.laps = None

    def _groups(self, written: list[int]) -> list[tuple[int, list[int]]]:
        groups: dict[str, tuple[int, list[int]]] = {}
        for rollout, count in zip(self.rollouts, written, strict=True):
            prompt = len(rollout.prompt.token_ids)
            groups.setdefault(rollout.group_id, (prompt, []))[1].append(count)
        return list(groups.values())

    def _lap(self, stage: str) -> None:
        if self.laps is not None:
            self.laps.lap(stage)


@contextmanager
def _starting(
    module: PolicyModule, engine: Engine, laps: Laps, in_vllm: dict[str, Any]
) -> Iterator[None]:
    """Time model loading and engine start separately in between the module's stages."""
    configure, start = module.configure_model, engine.start

    def configure_model() -> None:
        laps.lap("set up")
        configure()
        laps.lap("model")

    def start_engine(model_dir: Any) -> None:
        laps.lap("set up")
        start(model_dir)
        laps.lap("engine")
        if isinstance(engine, KeptEngine):
            compilation = engine._llm.vllm_config.compilation_config
            in_vllm["sizes captured"] = len(compilation.cudagraph_capture_sizes or [])
            in_vllm["compile_s"] = getattr(compilation, "compilation_time", None)

    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "configure_model", configure_model))
        stack.enter_context(patch.object(engine, "start", start_engine))
        if isinstance(engine, KeptEngine):
            from vllm.v1.worker.gpu_worker import Worker

            for method, stage in STAGES_OF_VLLM.items():
                timed = _timed(getattr(Worker, method), in_vllm, f"{stage}_s")
                stack.enter_context(patch.object(Worker, method, timed))
        yield


def _timed(method: Any, seconds: dict[str, Any], name: str) -> Any:
    def run_timed(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **keywords)
        finally:
            seconds[name] = time.perf_counter() - began

    return run_timed
