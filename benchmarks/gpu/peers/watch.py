"""Measure both sides: seconds of stages, tokens in passes, floating-point operations."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import settle
from benchmarks.gpu.peers.task import IMPOSSIBLE, process_seconds


class Laps:
    """Seconds of the stages of a start, one after another; the first began with the process."""

    def __init__(self, bench: Bench, import_s: float) -> None:
        self.bench = bench
        self.seconds = {"import": import_s}
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Credit the time since the last call to this stage."""
        settle(self.bench)
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    @property
    def total(self) -> float:
        """Return the total without waiting for the turn."""
        return sum(self.seconds.values())


def import_seconds() -> float:
    """Return the import seconds; call this at the end of a module that imports all of a side."""
    return process_seconds()


class PassedTokens:
    """Counts the tokens, padding included, that go through a model's passes with gradients."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.get_input_embeddings().register_forward_hook(self._see)

    def _see(self, embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            self.count += inputs[0].numel()

    def take(self) -> int:
        """Return the samples since the last call."""
        count, self.count = self.count, 0
        return count


@torch.no_grad()
def forbid_end(model: Any) -> None:
    """Forbid the end: completions of a made model go on to their limit from now on."""
    model.get_input_embeddings().weight[model.config.eos_token_id, 0] = IMPOSSIBLE


def model_flops(
    config: Any, passed: int, groups: Sequence[tuple[int, Sequence[int]]]
) -> dict[str, float]:
    """Count the operations of an update of all weights, both passes, without recomputation.

    6 x (parameters of the layers) x ``passed`` tokens, + 6 x (parameters of the output layer) x
    written tokens, + 12 x layers x heads x head width x pairs of a query and a key that it may see.
    ``groups`` have the tokens of a prompt, which is counted once, and of each of its completions.
    """
    hidden, width = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    written = sum(sum(completions) for _, completions in groups)
    pairs = sum(
        prompt**2 / 2 + sum(n * (prompt + n / 2) for n in completions)
        for prompt, completions in groups
    )
    return {
        "layers": 6.0 * config.num_hidden_layers * layer * passed,
        "head": 6.0 * config.vocab_size * hidden * written,
        "attention": 12.0 * config.num_hidden_layers * heads * width * pairs,
    }


def peak_gib(bench: Bench) -> float | None:
    """Return the most that torch had allocated, vLLM's part included; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if bench.device == "cuda" else None
