"""Does an engine sample from the LoRA that is trained? Adapters apart, and merged, in bfloat16.

    OMP_NUM_THREADS=1 python -m benchmarks.lora_gap [--engine vllm] [--save]

The quickstart's model (1.6 million random weights) with a LoRA of rank 16 is trained by AdamW as
``bf16-mixed`` does: 200 steps at a rate of 1e-4 on 16 completions of 12 tokens, each weighted by a
random advantage. Every 20 steps its weights are pushed to three engines in bfloat16: one keeps
base and adapters ``apart``, one has them ``merged``; the third (``none``) has the merged weights of
a trainer without LoRA, which has them too. Each writes 128 completions.

The last line is JSON, in nats and CPU seconds, means over the pushes: ``gap`` is the mean
difference of a token's logprobs between an engine and its trainer, both in bfloat16. ``drift`` is
the part of it that is the weights': the logprobs of what the engine holds and of what the trainer
computes with, both in float32. ``write`` and ``push`` are a round's CPU seconds. ``float32`` are
the same figures, over a quarter of the steps, where engines and trainer compute in float32;
``NF4`` and ``Int8``, in bfloat16 where the LoRA's frozen base is in few bits. There ``none`` is a
model of the merged weights, as they are.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.results import parser_of, report
from benchmarks.support.task import sampled
from lightning_rl import NF4, Int8, LoRA, MemoryTransport, Sampling, TransformersEngine, VLLMLocal
from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.base import Engine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantization import Quantization
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.sync.base import push
from recipes.sort_digits.prepare import make_model, make_tokenizer, write_model

SAMPLING = Sampling(max_tokens=12, min_tokens=12)
WAYS = {"apart": "apart", "merged": "merged", "none": "merged"}
LR = 1e-4


def engine_of(kind: str, dtype: str, adapters: str) -> Engine:
    if kind == "vllm":
        return VLLMLocal(dtype, max_model_len=32, kv_cache_gb=0.1, adapters=adapters)
    return TransformersEngine(dtype, device="cpu", adapters=adapters)


def prompts() -> list[Prompt]:
    """Make 32 rows of three to eight digits."""
    rng = random.Random(0)
    rows = [[3 + rng.randrange(10) for _ in range(rng.randint(3, 8))] for _ in range(32)]
    return [Prompt(str(place), "", [*row, 2]) for place, row in enumerate(rows)]


def scored(policy: Policy, batch: Any) -> Tensor:
    """Return the logprobs of a packed batch's loss tokens."""
    logprobs: Tensor = policy(batch).logprobs
    return logprobs


def rounded(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: weight.bfloat16().float() for name, weight in weights}


def as_trained(policy: Policy) -> dict[str, Tensor]:
    """Return the weights of autocast, which rounds base and factors, and scales after them."""
    effective = rounded(policy.named_base_weights())
    for name, module in policy.lm.named_modules():
        if hasattr(module, "get_delta_weight"):
            a, b = (getattr(module, f"lora_{x}")["default"].weight for x in "AB")
            product = b.detach().bfloat16().float() @ a.detach().bfloat16().float()
            effective[f"{name}.weight"] = (
                effective[f"{name}.weight"] + module.scaling["default"] * product
            )
    return effective


def as_held(policy: Policy, way: str) -> dict[str, Tensor]:
    """Return the weights by which an engine computes."""
    if way == "merged":
        return rounded(policy.named_weights())
    effective, factors = (
        rounded(policy.named_base_weights()),
        rounded(policy.named_adapter_weights()),
    )
    for name in [name for name in factors if name.endswith("lora_A")]:
        layer = name.removesuffix(".lora_A")
        effective[f"{layer}.weight"] += factors[f"{layer}.lora_B"] @ factors[name]
    return effective


class Way:
    """An engine, and what was measured of it."""

    def __init__(self, engine: Engine, rank: int, skeleton: Path) -> None:
        self.engine, self.transport = engine, MemoryTransport()
        engine.configure_lora(rank, lambda: None)
        engine.start(skeleton)
        self.transport.connect(engine)
        self.figures: dict[str, list[float]] = {"gap": [], "drift": [], "write": [], "push": []}

    def push(self, policy: Policy, version: int) -> None:
        with self._timed("push"):
            push(self.transport, self.engine, policy, version)

    def write(self, version: int) -> list[Rollout]:
        with self._timed("write"):
            return sampled(self.engine, prompts(), SAMPLING, version)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.figures[name].append(time.process_time() - begin)


class Study:
    """A LoRA that is trained, and engines that are to sample from it."""

    def __init__(
        self,
        kind: str,
        dtype: str,
        rank: int,
        directory: Path,
        quantization: Quantization | None,
    ) -> None:
        model, skeleton = directory / "model", directory / "skeleton"
        write_model(model, make_model(), make_tokenizer())
        save_skeleton(str(model), skeleton)
        torch.manual_seed(0)
        lora = LoRA(rank=rank, alpha=2.0 * rank, quantization=quantization)
        self.policy = Policy(str(model), lora=lora)
        self.whole, self.exact = Policy(str(model)), Policy(str(model))
        self.ways = {
            name: Way(engine_of(kind, dtype, adapters), rank, skeleton)
            for name, adapters in WAYS.items()
            if not (name == "none" and dtype == "float32")
        }
        self.optimizer = torch.optim.AdamW(self.policy.parameter_groups(None), lr=LR)
        self.in_16_bits = dtype != "float32"

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.in_16_bits else nullcontext()

    def train(self, batch: Any, generator: torch.Generator) -> None:
        advantages = torch.randn(len(batch["rollouts"]), generator=generator)
        with self.autocast():
            scores = self.policy(batch)
        weights = advantages[token_rows(batch)[scores.live]]
        self.optimizer.zero_grad()
        (-weights * scores.logprobs).mean().backward()
        self.optimizer.step()

    @torch.no_grad()
    def measure(self, version: int) -> None:
        self.whole.lm.load_state_dict(dict(self.policy.named_weights()))
        for name, way in self.ways.items():
            trainer = self.whole if name == "none" else self.policy
            way.push(trainer, version)
            batch = pack_rollouts(way.write(version))
            with self.autocast():
                scores = trainer(batch)
            sampled = batch["tokens"][scores.live]["rollout_logprobs"]
            way.figures["gap"].append(float((scores.logprobs - sampled).abs().mean()))
            if name != "none" and self.in_16_bits:
                way.figures["drift"].append(self._drift(batch, name))

    def _drift(self, batch: Any, way: str) -> float:
        found = []
        for weights in (as_trained(self.policy), as_held(self.policy, way)):
            self.exact.lm.load_state_dict(weights)
            found.append(scored(self.exact, batch))
        return float((found[0] - found[1]).abs().mean())

    def close(self) -> None:
        for way in self.ways.values():
            way.transport.close()
            way.engine.close()


def measure(
    kind: str,
    updates: int = 200,
    every: int = 20,
    rank: int = 16,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
) -> dict[str, dict[str, float]]:
    """Measure means of each way's figures over all pushes but the first."""
    with tempfile.TemporaryDirectory() as directory:
        study = Study(kind, dtype, rank, Path(directory), quantization)
        study.measure(0)  # warms up
        batch = pack_rollouts(study.ways["apart"].write(0)[::8])
        generator = torch.Generator().manual_seed(0)
        for update in range(1, updates + 1):
            study.train(batch, generator)
            if update % every == 0:
                study.measure(update)
        study.close()
        return {
            name: {
                figure: statistics.fmean(values[1:])
                for figure, values in way.figures.items()
                if values
            }
            for name, way in study.ways.items()
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = measure(given.engine, given.updates, rank=given.rank)
    found["float32"] = measure(given.engine, given.updates // 4, rank=given.rank, dtype="float32")
    for form in (NF4(), Int8()):
        name = type(form).__name__
        found[name] = measure(given.engine, given.updates // 4, rank=given.rank, quantization=form)
    for name, figures in found.items():
        print(name, figures)
    report(f"lora-gap-{given.engine}", {"rank": given.rank} | found, given.save)


if __name__ == "__main__":
    main()
