"""What do two LoRA policies cost an engine, over one whose LoRA is merged?

    OMP_NUM_THREADS=1 python -m benchmarks.adapters [--save]

The quickstart's model (1.6 million random weights) writes 256 completions of 12 tokens: by one
policy, whose adapters are merged into the engine's weights, or half of them by each of two. These
have one engine, with the base once (`VLLMAdapters`, `TransformersAdapters`), or one each, with
merged weights (as `MultiPolicyEngine` has them). The ways take turns in one process. Each is told
what it is to write by a push before each round; pushes are timed by themselves.

The last line is JSON: CPU seconds of a round and of a push, and `ratio`, the median over the rounds
of a round's seconds over those of the one merged policy in the same engine.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.results import parser_of, report
from lightning_rl import LoRA, MemoryTransport, Sampling, TransformersEngine, VLLMLocal
from lightning_rl.engines.base import Engine
from lightning_rl.extend import (
    MultiPolicyEngine,
    TransformersAdapters,
    VLLMAdapters,
    WeightTransport,
)
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.base import push
from recipes.sort_digits.prepare import make_model, make_tokenizer, write_model

NAMES = ("prover", "verifier")
REQUESTS = 256
SAMPLING = Sampling(max_tokens=12, min_tokens=12)


def vllm(kind: type[VLLMLocal], **options: Any) -> VLLMLocal:
    return kind(max_model_len=32, kv_cache_gb=0.1, **options)


WAYS: dict[str, Callable[[int], Engine]] = {
    "VLLMLocal, one policy": lambda rank: vllm(VLLMLocal),
    "VLLMAdapters": lambda rank: vllm(VLLMAdapters, max_lora_rank=rank),
    "two VLLMLocal": lambda rank: MultiPolicyEngine({name: vllm(VLLMLocal) for name in NAMES}),
    "TransformersEngine, one policy": lambda rank: TransformersEngine(device="cpu"),
    "TransformersAdapters": lambda rank: TransformersAdapters(device="cpu"),
    "two TransformersEngine": lambda rank: MultiPolicyEngine(
        {name: TransformersEngine(device="cpu") for name in NAMES}
    ),
}
ONE = {
    name: f"{'VLLMLocal' if 'VLLM' in name else 'TransformersEngine'}, one policy" for name in WAYS
}


class Way:
    """An engine that serves one policy or two, and what its rounds and pushes took."""

    def __init__(self, engine: Engine, names: Sequence[str], skeleton: Path) -> None:
        self.engine = engine
        if len(names) > 1:
            engine.serve({name: name for name in names})
        engine.start(skeleton)
        self.transports: dict[str, WeightTransport] = {name: MemoryTransport() for name in names}
        for name, transport in self.transports.items():
            transport.connect(engine.of_policy(name))
        self.rounds: list[float] = []
        self.pushes: list[float] = []

    def run(self, policies: dict[str, Policy], prompts: Sequence[list[int]], version: int) -> None:
        """Run one round."""
        begin = time.process_time()
        for name, transport in self.transports.items():
            push(transport, self.engine.of_policy(name), policies[name], version)
        self.pushes.append((time.process_time() - begin) / len(self.transports))
        begin = time.process_time()
        run_async(self._write(prompts))
        self.rounds.append(time.process_time() - begin)

    async def _write(self, prompts: Sequence[list[int]]) -> None:
        writers = [self.engine.of_policy(name) for name in self.transports]
        await asyncio.gather(
            *(
                writers[seed % len(writers)].generate(prompt, SAMPLING, seed)
                for seed, prompt in enumerate(prompts)
            )
        )


def made_prompts() -> list[list[int]]:
    """Return rows of three to eight digits, each for eight completions."""
    rng = random.Random(0)
    rows = ([3 + rng.randrange(10) for _ in range(rng.randint(3, 8))] for _ in range(REQUESTS // 8))
    return [[*row, 2] for row in rows for _ in range(8)]


def trained(model: str, rank: int, seed: int) -> Policy:
    """Return a LoRA policy whose adapters are not zero."""
    policy, generator = Policy(model, lora=LoRA(rank=rank)), torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return policy


def measure(rounds: int, rank: int) -> dict[str, Any]:
    prompts = made_prompts()
    with tempfile.TemporaryDirectory() as directory:
        model, skeleton = Path(directory) / "model", Path(directory) / "skeleton"
        write_model(model, make_model(), make_tokenizer())
        save_skeleton(str(model), skeleton)
        policies = {name: trained(str(model), rank, seed) for seed, name in enumerate(NAMES)}
        ways = {
            name: Way(make(rank), NAMES[:1] if name == ONE[name] else NAMES, skeleton)
            for name, make in WAYS.items()
        }
        for number in range(rounds + 2):  # two to warm up
            for way in ways.values():
                way.run(policies, prompts, number)
        for way in ways.values():
            way.engine.close()
    found = {}
    for name, way in ways.items():
        ratios = (own / one for own, one in zip(way.rounds, ways[ONE[name]].rounds, strict=True))
        found[name] = {
            "seconds": statistics.median(way.rounds[2:]),
            "push": statistics.median(way.pushes[2:]),
            "ratio": statistics.median(list(ratios)[2:]),
        }
    return found


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = measure(arguments.rounds, arguments.rank)
    for name, figures in found.items():
        print(f"{name:32} {figures['seconds']:.3f} s  x {figures['ratio']:.2f}")
    report("adapters", {"rank": arguments.rank} | found, arguments.save)


if __name__ == "__main__":
    main()
