"""Measure each transport beside its floor, and pushes to a real server."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.sync.receiver import TIMEOUT_S, ReceiverEngine
from lightning_rl.engines.replicas.server import VLLMServer
from lightning_rl.run.loop.background import runtime
from lightning_rl.sync.adapters import merge
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.group import BroadcastGroup
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.staged import StagedTransport
from recipes.sort_digits.prepare import make_tokenizer

NAMES = ("memory", "checkpoint", "collective")
RANK = 16


def make_config(millions: float) -> Qwen2Config:
    """Return twelve layers whose width gives about this many parameters."""
    width = 32 * max(1, round((millions * 1e6 / (12 * 16)) ** 0.5 / 32))
    return Qwen2Config(
        vocab_size=16, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=12,
        num_attention_heads=width // 32, num_key_value_heads=width // 32,
        max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def make_weights(config: Qwen2Config) -> dict[str, Tensor]:
    """Make weights under the names and shapes of such a model."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    return {name: torch.rand(meta.shape) for name, meta in shapes.items()}


def make_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make a LoRA of rank 16 on all linear layers but the output."""
    adapters = {}
    for name, weight in weights.items():
        if ".layers." in name and weight.dim() == 2:
            layer, (out, into) = name.removesuffix(".weight"), weight.shape
            adapters[f"{layer}.lora_A"] = torch.rand(RANK, into)
            adapters[f"{layer}.lora_B"] = torch.rand(out, RANK)
    return adapters


def least_seconds(acts: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Time each call in turns, to and fro; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds + 1):
        # What comes after a big write waits for the disk, so each comes first as often as last.
        for name in list(acts)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            acts[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(values[1:]) for name, values in seconds.items()}


def make_transports(directory: Path, adapters_only: bool = False) -> dict[str, StagedTransport]:
    """Make the three ways."""
    return {
        "memory": MemoryTransport(adapters_only=adapters_only),
        "checkpoint": CheckpointTransport(str(directory / "weights"), adapters_only=adapters_only),
        "collective": CollectiveTransport("gloo", adapters_only=adapters_only),
    }


def pushes(transport: StagedTransport, weights: Mapping[str, Tensor]) -> Callable[[], None]:
    version = iter(range(10**6))
    return lambda: transport.push(weights.items(), next(version))


def measure(millions: float, directory: Path, rounds: int) -> dict[str, Any]:
    """Measure seconds, GB/s and the ratio floor / ours of each transport."""
    weights = make_weights(make_config(millions))
    count = sum(weight.numel() for weight in weights.values())
    source, target = torch.rand(count), torch.empty(count)
    engine = ReceiverEngine(weights)
    file = directory / "plain"
    with file.open("wb") as opened:
        opened.truncate(4 * count)

    def copy_file() -> None:
        shutil.copyfile(file, directory / "copy")
        with (directory / "copy").open("rb") as copied:
            os.fsync(copied.fileno())

    group = BroadcastGroup("127.0.0.1", 0, 0, 2, "gloo", TIMEOUT_S)
    meeting = asyncio.run_coroutine_threadsafe(
        engine.replica.transfer("meet", TIMEOUT_S, port=group.port, numel=count), runtime.loop
    )
    group.meet()
    meeting.result()

    def broadcast() -> None:
        receiving = asyncio.run_coroutine_threadsafe(
            engine.replica.transfer("receive", TIMEOUT_S), runtime.loop
        )
        group.wait(group.broadcast(source))
        receiving.result()

    floors: dict[str, Callable[[], Any]] = {
        "memory": lambda: target.copy_(source),
        "checkpoint": copy_file,
        "collective": broadcast,
    }
    expected = float(sum(weight.double().sum() for weight in weights.values()))
    result: dict[str, Any] = {"parameters": count}
    for name, transport in make_transports(directory).items():
        transport.connect(engine)
        push = pushes(transport, weights)

        def act(copies: bool, push: Callable[[], None] = push) -> None:
            engine.replica.ask("set_copies", copies=copies)
            push()

        acts: dict[str, Callable[[], Any]] = {
            "floor": floors[name],
            "ours": partial(act, False),
            "copied": partial(act, True),
        }
        seconds = least_seconds(acts, rounds)
        transport.close()
        if abs(engine.replica.ask("checksum") - expected) > 1e-6 * expected:
            raise RuntimeError(f"{name} brought other weights")
        result[name] = {
            "seconds": seconds["ours"],
            "gb_per_s": 4e-9 * count / seconds["ours"],
            "floor_gb_per_s": 4e-9 * count / seconds["floor"],
            "ratio": seconds["floor"] / seconds["ours"],
            "copied_ratio": seconds["floor"] / seconds["copied"],
        }
    group.close()
    result["adapters"] = measure_adapters(engine, weights, directory, rounds)
    engine.close()
    return result


def measure_adapters(
    engine: ReceiverEngine, weights: Mapping[str, Tensor], directory: Path, rounds: int
) -> dict[str, Any]:
    """Measure seconds and bytes of each transport, once it has brought the base."""
    adapters = make_adapters(weights)

    def merging() -> None:
        for name, weight in weights.items():
            merge(name, weight, adapters)

    engine.replica.ask("set_copies", copies=False)
    result: dict[str, Any] = least_seconds({"merging": merging}, rounds)
    for name, transport in make_transports(directory, adapters_only=True).items():
        transport.connect(engine)
        transport.push((adapters | dict(weights)).items(), 0)
        with_base = engine.replica.ask("bytes_received")
        result[name] = least_seconds({name: pushes(transport, adapters)}, rounds)[name]
        result["bytes"] = engine.replica.ask("bytes_received")
        result["share"] = result["bytes"] / (with_base - result["bytes"])
        transport.close()
    return result


def measure_vllm(millions: float, directory: Path, rounds: int) -> dict[str, float]:
    """Measure seconds per push to a real server, loading and all checks included."""
    config = make_config(millions)
    weights = make_weights(config)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    engine = VLLMServer(max_model_len=128, kv_cache_gb=0.05)
    engine.start(directory / "model")
    result = {}
    try:
        for name, transport in make_transports(directory).items():
            transport.connect(engine)
            result[name] = least_seconds({name: pushes(transport, weights)}, rounds)[name]
            transport.close()
        adapters, alone = make_adapters(weights), MemoryTransport(adapters_only=True)
        alone.connect(engine)
        alone.push((adapters | weights).items(), 0)
        result |= least_seconds({"adapters": pushes(alone, adapters)}, rounds)
        alone.close()
    finally:
        engine.close()
    return result
