"""Run TRL's GRPOTrainer on the task of ``benchmarks.gpu.peers``, with vLLM in its process.

What it shares with ours is set: batches, learning rate, temperature 1, no KL, float32 weights
computed with in bfloat16, vLLM's share of the card. All else is TRL's default, gradient
checkpointing and a correction for the engine's logprobs included, or what the task says.
"""

import os
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from vllm import LLM  # noqa: F401  (else TRL would import it as it starts)

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import settle
from benchmarks.gpu.peers.task import EQUAL, LOT, Lines, Task, lot
from benchmarks.gpu.peers.watch import Laps, PassedTokens, forbid_end, import_seconds, peak_gib

IMPORT_S = import_seconds()


def run(bench: Bench, side: str, **options: Any) -> None:
    """Run completions that end by lot, then such of equal length."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    task = Task(**options).on(bench)
    told = Lines(bench, side)
    laps = Laps(bench, IMPORT_S)
    directory = task.directory(bench)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    laps.lap("model")
    clock = Clock(bench, task, told, laps, PassedTokens(model))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=clock.grade,
        args=_settings(bench, task),
        train_dataset=load_dataset(
            "json", data_files=str(directory / "train.jsonl"), split="train"
        ),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        peft_config=_adapters() if task.lora else None,
        callbacks=[clock],
    )
    laps.lap("trainer and engine")
    clock.watch(trainer)
    trainer.train()


def _settings(bench: Bench, task: Task) -> Any:
    settings = {"per_device_train_batch_size": 8} | dict(task.trl)
    completions = task.groups * task.group_size
    return GRPOConfig(
        output_dir=str(bench.scratch / "trl"),
        max_steps=task.iterations + task.equal_iterations,
        gradient_accumulation_steps=completions // settings["per_device_train_batch_size"],
        num_generations=task.group_size,
        max_completion_length=task.longest,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=task.share,
        vllm_max_model_length=task.max_model_len,
        logging_steps=10**9,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class Clock(TrainerCallback):
    """Tells a line per iteration; after the last that ends by lot, nothing ends by itself."""

    def __init__(
        self, bench: Bench, task: Task, told: Lines, laps: Laps, passed: PassedTokens
    ) -> None:
        self.bench, self.task, self.told, self.passed = bench, task, told, passed
        self.laps: Laps | None = laps
        self.written: list[int] = []
        self.seconds: dict[str, float] = {}

    def grade(
        self, completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """Return a reward for each completion."""
        self.written = [len(ids) for ids in completion_ids]
        return [lot(completion) for completion in completions]

    def watch(self, trainer: Any) -> None:
        """Time what the trainer does beside updates."""
        self.trainer = trainer
        self._time(trainer, "_generate_and_score_completions", "collect_s")
        self._time(trainer.vllm_generation, "generate", "generate_s")
        self._time(trainer.vllm_generation, "sync_weights", "sync_s")

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, *arguments: Any, **keywords: Any) -> None:
        settle(self.bench)
        now = time.perf_counter()
        wall = now - self._since
        self.told.tell(
            phase=LOT if state.global_step <= self.task.iterations else EQUAL,
            wall_s=wall,
            written=sum(self.written),
            longest=max(self.written),
            passed=self.passed.take(),
            update_s=wall - self.seconds["collect_s"],
            peak_gib=peak_gib(self.bench),
            **self.seconds,
        )
        if self.laps is not None:
            self.laps.lap("first iteration")
            self.told.tell(start_s=self.laps.total, stages=self.laps.seconds)
            self.laps = None
        if state.global_step == self.task.iterations:
            forbid_end(self.trainer.accelerator.unwrap_model(self.trainer.model))
            self.trainer.vllm_generation.max_completion_length = self.task.mean
        self.seconds, self._since = {}, now

    def _time(self, owner: Any, method: str, name: str) -> None:
        """Time a call, nested ones twice: a sleeping engine is sent weights as it generates."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            settle(self.bench)
            began = time.perf_counter()
            found = inner(*arguments, **keywords)
            settle(self.bench)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return found

        setattr(owner, method, timed)
