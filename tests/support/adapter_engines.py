"""Two LoRA policies on one base in one engine: which they are, how each is pushed and asked."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_rl.engines import Sampling
from lightning_rl.engines.sampling import Completion
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.base import push
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import PROMPTS, plain_model, require_written_by, train_adapters

ROLES = {"first": "prover", "second": "prover", "judge": "verifier"}
LORAS = {
    "prover": LoRA(rank=8, alpha=16.0),
    # A part of what vLLM fuses, in another rank.
    "verifier": LoRA(rank=3, alpha=6.0, target_modules=["v_proj", "gate_proj", "down_proj"]),
}
FIXED = Sampling(max_tokens=12, min_tokens=12, temperature=0.8)


class Trainers:
    """The policies of a model, and a transport from each to its place in an engine."""

    def __init__(
        self, model: Path, engine: Any, transport: Callable[[], Any] = MemoryTransport
    ) -> None:
        self.model, self.engine = model, engine
        self.policies = {name: Policy(str(model), lora=lora) for name, lora in LORAS.items()}
        self._weights: dict[str, dict[str, Tensor]] = {}
        self.transports = {name: transport() for name in LORAS}
        for name, connecting in self.transports.items():
            connecting.connect(engine.of_policy(name))

    def push(self, name: str, version: int) -> None:
        """Push other weights than before."""
        self._weights[name] = train_adapters(self.policies[name], seed=version)
        push(self.transports[name], self.engine.of_policy(name), self.policies[name], version)

    def plain(self, name: str) -> Any:
        """Compute with transformers what was pushed last, merged."""
        return plain_model(self.model, self._weights[name])

    def check(self, name: str, completions: Sequence[Completion]) -> None:
        require_written_by(self.plain(name), PROMPTS, completions, FIXED)


def asked(
    engine: Any,
    *roles: str,
    prompts: Sequence[list[int]] = PROMPTS,
    sampling: Sampling = FIXED,
) -> list[list[Completion]]:
    """Ask all prompts for all roles, in flight together, so that each prompt is of two policies."""

    async def ask(prompt: list[int], seed: int) -> list[Completion]:
        ways = (engine.of_role(role).generate(prompt, sampling, seed) for role in roles)
        return await asyncio.gather(*ways)

    async def run() -> list[list[Completion]]:
        return await asyncio.gather(*(ask(prompt, seed) for seed, prompt in enumerate(prompts)))

    by_prompt = run_async(run())
    return [[answers[i] for answers in by_prompt] for i in range(len(roles))]
