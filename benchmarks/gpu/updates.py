"""Time an update of models of 0.5B and 1.5B parameters, stage by stage."""

import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import begin_peak, counted_waits, give_back, peak_bytes, settle
from benchmarks.gpu.made import adamw, model_of, rollouts_of, trainer_of
from lightning_rl import Loading, PolicyModule, UpdateSettings
from lightning_rl.algos.advantages import Advantage
from lightning_rl.callbacks import RLCallback
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.batch import token_rows
from lightning_rl.errors import MicroBatchMemoryError
from lightning_rl.extend import pack_rollouts
from lightning_rl.models import policy as policy_code
from lightning_rl.models.attention.packed import PackLayout

MICRO_BATCHES = {"60x256": (60, 256), "8x2000": (8, 2000), "1x16000": (1, 16_000)}
TINY_MICRO_BATCHES = {"6x12": (6, 12), "2x40": (2, 40), "1x100": (1, 100)}
WARM_UP, STAGED, WHOLE, WAITS = range(4)
"""The purpose of each iteration."""
PLAN_IS_OFF = 1.25
"""Times the peak, or less than its inverse: then `check` misleads."""


def update(bench: Bench, shape: str) -> None:
    """Measure milliseconds by stage, waits for the device, and peak memory against the plan's."""
    for name, (count, tokens) in (TINY_MICRO_BATCHES if bench.tiny else MICRO_BATCHES).items():
        with bench.case(name):
            if not _fits(bench, shape, name, count, tokens):
                _measure(bench, shape, f"{name} checkpointed", count, tokens, recompute=True)


def _fits(bench: Bench, shape: str, name: str, count: int, tokens: int) -> bool:
    """Measure, if there is memory enough."""
    try:
        _measure(bench, shape, name, count, tokens)
    except MicroBatchMemoryError as error:  # which holds on to what was computed so far
        bench.note({f"{name} out of memory": str(error).splitlines()[0]})
        return False
    return True


def _measure(
    bench: Bench, shape: str, name: str, count: int, tokens: int, recompute: bool = False
) -> None:
    give_back(bench)
    module = PolicyModule(
        str(model_of(bench, shape)),
        advantage=RewardItself(),
        optimizer=adamw(1e-6),
        # One micro-batch.
        update=UpdateSettings(max_tokens_per_micro_batch=2 * count * (tokens + 64)),
        loading=Loading(random_init=True, gradient_checkpointing=recompute),
        compile=False,  # the plan is of layers that are not
    )
    watch = Stages(bench)
    trainer = trainer_of(bench, precision="bf16-mixed", callbacks=[watch])
    try:
        trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts_of(count, tokens)), 4))
    finally:
        bench.note({name: watch.figures})
        watch.stack.close()
    peak, planned = watch.peak, watch.planned
    if peak is not None and watch.micro_batches == 1:
        off = max(planned / peak, peak / planned)
        bench.require(
            off < PLAN_IS_OFF,
            f"{name}: {planned / 2**30:.1f} GiB planned, {peak / 2**30:.1f} GiB used",
        )


class RewardItself(Advantage):
    """Credits every token with the reward; a group's mean would leave nothing of one rollout."""

    def __call__(self, batch: TensorDict) -> TensorDict:
        batch["tokens", "advantages"] = batch["rollouts", "reward"][token_rows(batch)]
        return batch


class Stages(RLCallback):
    """Times one update: its stages with waits between them, then the whole without."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.stack = ExitStack()
        self.stages: dict[str, float] = defaultdict(float)
        self.waits: list[str] = []
        self.micro_batches = self.planned = 0
        self.peak: int | None = None
        self.whole = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        """Return all figures that are known so far."""
        figures: dict[str, Any] = {f"{stage} ms": ms for stage, ms in self.stages.items()}
        figures |= {
            "update ms": self.whole,
            "micro-batches": self.micro_batches,
            "plan GiB": self.planned / 2**30,
        }
        if self.peak is not None:
            figures |= {"peak GiB": self.peak / 2**30, "waits": len(self.waits)}
            figures["waits at"] = " ".join(sorted(set(self.waits)))
        return figures

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PolicyModule) and pl_module.policy is not None
        assert trainer.train_dataloader is not None
        micro_batch = next(iter(trainer.train_dataloader)).to(pl_module.device)
        plan = training_memory(
            pl_module.policy,
            [],
            pl_module.optimizer,
            micro_batch,
            Placement(pl_module.device, str(trainer.precision)),
        )
        self.planned = plan.total

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict, batch_idx: int
    ) -> None:
        if batch_idx == STAGED:
            self._mark_stages(trainer)
        elif batch_idx == WAITS:
            self.stack.enter_context(counted_waits(self.bench, self.waits))
        begin_peak(self.bench)
        settle(self.bench)
        self._began = self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stack.close()
        if batch_idx == WHOLE:
            settle(self.bench)
            self.whole = (time.perf_counter() - self._began) * 1e3
            self.peak = peak_bytes(self.bench)

    # ---------------------------------------------------------------- one update in stages

    def lap(self, stage: str) -> None:
        """Credit the time since the last call to this stage."""
        settle(self.bench)
        now = time.perf_counter()
        self.stages[stage] += (now - self._since) * 1e3
        self._since = now

    def _mark_stages(self, trainer: Trainer) -> None:
        build, score = policy_code.build_layout, policy_code.token_logprobs

        def build_layout(micro_batch: TensorDict) -> PackLayout:
            self.lap("other")
            layout = build(micro_batch)
            # Worked out when the first layer asks for it.
            _ = layout.varlen if self.bench.device == "cuda" else layout.batches
            self.lap("layout")
            self.micro_batches += 1
            return layout

        def token_logprobs(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            self.lap("body")
            logprobs, entropy = score(hidden, *arguments)
            self.lap("head")
            if logprobs.requires_grad:
                logprobs.register_hook(lambda _: self.lap("loss"))
                hidden.register_hook(lambda _: self.lap("head backward"))
            return logprobs, entropy

        self.stack.enter_context(patch.object(policy_code, "build_layout", build_layout))
        self.stack.enter_context(patch.object(policy_code, "token_logprobs", token_logprobs))
        hook = trainer.optimizers[0].register_step_post_hook(lambda *_: self.lap("optimizer"))
        self.stack.callback(hook.remove)
        backward = patch.object(self, "on_after_backward", lambda *_: self.lap("body backward"))
        self.stack.enter_context(backward)
