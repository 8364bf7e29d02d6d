"""Update with and without ``torch.compile``: measure its speed, peak memory and rounding."""

import random
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import begin_peak, give_back, peak_bytes, settle
from benchmarks.gpu.made import FIRST, LAST, model_of, trainer_of
from benchmarks.gpu.updates import RewardItself
from lightning_rl import Loading, PolicyModule, Prompt, Recompute, Rollout
from lightning_rl.callbacks import RLCallback
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.extend import Policy, RolloutStatus, Row, pack_rollouts
from recipes.math.make_model import SHAPES, SHARED
from recipes.sort_digits.prepare import make_tokenizer

UPDATES = 4
"""Updates are made this often in each way; the first compiles and makes the optimizer's state."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False, "gradient_checkpointing": False},
    "compiled": {"compile": True, "gradient_checkpointing": False},
    "compiled, every second layer recomputed": {
        "compile": True,
        "gradient_checkpointing": Recompute(every=2),
    },
    "compiled, all recomputed": {"compile": True, "gradient_checkpointing": True},
}
MORE_ROUNDING = 1.5
"""Times as far from float32 as plain layers in bfloat16 compiled ones may be."""


def compiled(bench: Bench, shape: str) -> None:
    """Measure tokens per second of an update's passes, and its peak, in each way."""
    rollouts = rollouts_by_lot(16 if bench.tiny else 256, 8 if bench.tiny else 256)
    prompts = {id(r.prompt): len(r.prompt.token_ids) for r in rollouts}
    tokens = sum(len(r.token_ids) for r in rollouts) + sum(prompts.values())
    for name, options in list(WAYS.items())[: 2 if bench.tiny else None]:
        with bench.case(name):
            give_back(bench)
            module = PolicyModule(
                str(_model(bench, shape)),
                loading=Loading(
                    random_init=True, gradient_checkpointing=options["gradient_checkpointing"]
                ),
                advantage=RewardItself(),
                compile=options["compile"],
            )
            watch = Clock(bench)
            trainer = trainer_of(bench, precision="bf16-mixed", callbacks=[watch])
            trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts), UPDATES))
            first, *others = watch.seconds
            figures = {"tokens": tokens, "first s": first, "s": min(others)}
            figures |= {"tokens/s": round(tokens / min(others)), "gradient": watch.norms[0]}
            if watch.peak is not None:
                figures["peak GiB"] = watch.peak / 2**30
            bench.note({name: figures})


def rounding(bench: Bench, shape: str) -> None:
    """Compare bfloat16 logprobs and gradients, plain and compiled, with those in float32."""
    rollouts = rollouts_by_lot(8 if bench.tiny else 32, 8 if bench.tiny else 256)
    micro_batch, found = pack_rollouts(rollouts).to(bench.device), {}
    ways = {"float32": (False, False), "plain": (False, True), "compiled": (True, True)}
    for name, (compile_layers, rough) in ways.items():
        give_back(bench)
        torch.manual_seed(0)
        policy = Policy(
            str(_model(bench, shape)),
            loading=Loading(random_init=True),
            compile_layers=compile_layers,
        ).to(bench.device)
        with torch.autocast(bench.device, torch.bfloat16, enabled=rough):
            scores = policy(micro_batch)
        (scores.logprobs.mean() + 0.1 * scores.entropy.mean()).backward()
        gradients = [p.grad for p in policy.lm.parameters() if p.grad is not None]
        found[name] = [scores.logprobs.detach(), *gradients]
    exact = found.pop("float32")

    def apart(tensors: list[Tensor]) -> float:
        """Return the largest of the distances, in norms of what is exact."""
        pairs = zip(tensors, exact, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs if b.any())

    figures = {
        name: {"logprobs": apart_of[0], "largest of all": apart_of[1]}
        for name, tensors in found.items()
        for apart_of in [(float((tensors[0] - exact[0]).abs().max()), apart(tensors))]
    }
    bench.note(figures)
    plain, fast = (figures[name]["largest of all"] for name in ("plain", "compiled"))
    bench.require(fast < MORE_ROUNDING * plain, f"compiled {fast:.2g} off, plain {plain:.2g}")


def _model(bench: Bench, shape: str) -> Path:
    """Make configuration and tokenizer of ``recipes.math.make_model``'s shape; tiny for a trial."""
    if bench.tiny:
        return model_of(bench, "tiny")
    directory = bench.scratch / "models" / shape
    if not directory.exists():
        kind, sizes = SHAPES[shape]
        kind(**SHARED, **sizes, eos_token_id=1, pad_token_id=0).save_pretrained(directory)
        make_tokenizer().save_pretrained(directory)
    return directory


def rollouts_by_lot(count: int, mean: int, prompt_tokens: int = 100) -> list[Rollout]:
    """Draw groups of 8 rollouts with lengths of this ``mean``, and at most four times it.

    All have a reward, and so are trained on.
    """
    rng = random.Random(0)
    rollouts: list[Rollout] = []
    for index in range(count):
        if index % 8 == 0:
            ids = [rng.randint(FIRST, LAST) for _ in range(prompt_tokens)]
            prompt = Prompt(str(index // 8), "made", ids)
        length = min(4 * mean, 1 + int(rng.expovariate(1 / mean)))
        written = [rng.randint(FIRST, LAST) for _ in range(length)]
        row = Row(prompt.token_ids, written, [True] * length, [-2.0] * length, [0] * length)
        rollouts.append(
            Rollout(
                prompt,
                group_id=prompt.id,
                sample_index=index % 8,
                seed=0,
                rows=[row],
                status=RolloutStatus.COMPLETED,
                reward=1.0 + index % 2,
            )
        )
    return rollouts


class Clock(RLCallback):
    """The seconds, the peak and the gradient's norm of each update."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seconds: list[float] = []
        self.norms: list[float] = []
        self.peak: int | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict, batch_idx: int
    ) -> None:
        begin_peak(self.bench)
        settle(self.bench)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        settle(self.bench)
        self.seconds.append(time.perf_counter() - self._began)
        self.norms.append(float(trainer.callback_metrics["policy/grad_norm"]))
        self.peak = peak_bytes(self.bench)
