"""How fast do weights get to another process, against moving the same bytes plainly?

    OMP_NUM_THREADS=1 python -m benchmarks.sync [--millions 1 100] [--vllm] [--save]

Float32 weights of layers like a transformer's go to one process. Each transport is measured beside
its floor, in turns, in one run; once until the other process has the weights in its memory (where
an engine's loader begins), and once until it has copied them into weights of its own:

- `memory`: a copy of the same bytes from one tensor to another;
- `checkpoint`: a copy of a file of that size, with fsync;
- `collective`: one gloo broadcast of one tensor of that size.

Seconds are the least of some rounds. The last line is JSON: floor / ours (without the second copy)
for the size nearest to 100 million parameters. With `--vllm`, also seconds to a real vLLM server,
loading included.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.results import report
from lightning_rl.collect.loop import background_loop, run_async
from lightning_rl.engines.base import Completion, Sampling
from lightning_rl.engines.replica import Replica
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.engines.vllm_server import VLLMServer
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.group import Group
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.remote import RemoteTransport
from lightning_rl.sync.sources import SOURCES
from recipes.sort_digits.prepare import make_tokenizer

ROUNDS = 5
TIMEOUT_S = 120.0


class Receiver:
    """In the other process: takes buckets from a source, and copies them into its own weights."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.source: Any = None
        self.group: Group | None = None
        self.copies = True

    def set_copies(self, copies: bool) -> None:
        self.copies = copies

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        if self.source is not None:
            self.source.close()
        source = SOURCES[init_info["source"]]
        self.source = source(torch.device("cpu"), 0, **init_info["options"])

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        if update_info["bucket"] is not None:
            weights = dict(self.source.fetch(update_info["bucket"]))
            for name, weight in weights.items() if self.copies else ():
                if name not in self.own:
                    self.own[name] = torch.empty_like(weight)
                self.own[name].copy_(weight)

    def checksum(self) -> float:
        return float(sum(weight.double().sum() for weight in self.own.values()))

    def meet(self, port: int, numel: int) -> None:
        self.group = Group("127.0.0.1", port, 1, 2, "gloo", TIMEOUT_S)
        self.group.meet()
        self.flat = torch.zeros(numel)

    def receive(self) -> None:
        assert self.group is not None
        self.group.wait(self.group.broadcast(self.flat))


def serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    receiver = Receiver()
    while True:
        try:
            step, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(receiver, step)(**arguments))


class ProcessReplica(Replica):
    """A :class:`Receiver`, behind a pipe."""

    can_restart = False

    def __init__(self) -> None:
        super().__init__("receiver", "127.0.0.1")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)

    async def start(self) -> None:
        await asyncio.to_thread(self._process.start)
        self.life += 1
        self.gone.clear()

    async def answers(self) -> bool:
        return self._process.is_alive()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        raise NotImplementedError("it only takes weights")

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def transfer(self, step: str, timeout_s: float, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.ask, step, **arguments)

    def ask(self, step: str, **arguments: Any) -> Any:
        self._connection.send((step, arguments))
        return self._connection.recv()

    async def stamp(self, version: int, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        self._connection.close()
        await asyncio.to_thread(self._process.join)


class ReceiverEngine(ReplicatedEngine):
    """Takes any weights."""

    dtype = "float32"
    max_length = 0

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(recovery_timeout_s=TIMEOUT_S, health_every_s=TIMEOUT_S)
        self.replica = ProcessReplica()
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.replicas = [self.replica]
        run_async(self._start())

    def _make_replicas(self, model_dir: Path) -> list[Replica]:
        return [self.replica]


def make_config(millions: float) -> Qwen2Config:
    """Twelve layers whose width gives about this many parameters."""
    width = 32 * max(1, round((millions * 1e6 / (12 * 16)) ** 0.5 / 32))
    return Qwen2Config(
        vocab_size=16, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=12,
        num_attention_heads=width // 32, num_key_value_heads=width // 32,
        max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def make_weights(config: Qwen2Config) -> dict[str, Tensor]:
    """Under the names and shapes of such a model."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    return {name: torch.rand(meta.shape) for name, meta in shapes.items()}


def least_seconds(acts: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Of each, in turns, to and fro; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds + 1):
        # What comes after a big write waits for the disk, so each comes first as often as last.
        for name in list(acts)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            acts[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(values[1:]) for name, values in seconds.items()}


def pushes(transport: RemoteTransport, weights: Mapping[str, Tensor]) -> Callable[[], None]:
    version = iter(range(10**6))
    return lambda: transport.push(weights.items(), next(version))


def measure(millions: float, directory: Path, rounds: int) -> dict[str, Any]:
    """Seconds, GB/s and the ratio floor / ours of each transport."""
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

    group = Group("127.0.0.1", 0, 0, 2, "gloo", TIMEOUT_S)
    meeting = asyncio.run_coroutine_threadsafe(
        engine.replica.transfer("meet", TIMEOUT_S, port=group.port, numel=count), background_loop()
    )
    group.meet()
    meeting.result()

    def broadcast() -> None:
        receiving = asyncio.run_coroutine_threadsafe(
            engine.replica.transfer("receive", TIMEOUT_S), background_loop()
        )
        group.wait(group.broadcast(source))
        receiving.result()

    floors: dict[str, Callable[[], Any]] = {
        "memory": lambda: target.copy_(source),
        "checkpoint": copy_file,
        "collective": broadcast,
    }
    transports: dict[str, RemoteTransport] = {
        "memory": MemoryTransport(),
        "checkpoint": CheckpointTransport(str(directory / "weights")),
        "collective": CollectiveTransport("gloo"),
    }
    expected = float(sum(weight.double().sum() for weight in weights.values()))
    result: dict[str, Any] = {"parameters": count}
    for name, transport in transports.items():
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
    engine.close()
    return result


def measure_vllm(millions: float, directory: Path, rounds: int) -> dict[str, float]:
    """Seconds per push to a real server, loading and all checks included."""
    config = make_config(millions)
    weights = make_weights(config)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    engine = VLLMServer(max_model_len=128, kv_cache_gb=0.05)
    engine.start(directory / "model")
    transports: dict[str, RemoteTransport] = {
        "memory": MemoryTransport(),
        "checkpoint": CheckpointTransport(str(directory / "weights")),
        "collective": CollectiveTransport("gloo"),
    }
    result = {}
    try:
        for name, transport in transports.items():
            transport.connect(engine)
            result[name] = least_seconds({name: pushes(transport, weights)}, rounds)[name]
            transport.close()
    finally:
        engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 100])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--vllm", action="store_true", help="also push to a real vLLM server")
    parser.add_argument("--save", action="store_true", help="keep the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for millions in arguments.millions:
        with tempfile.TemporaryDirectory(dir=".", prefix=".sync_") as directory:
            rows[f"{millions:g}M"] = measure(millions, Path(directory), arguments.rounds)
            if arguments.vllm:
                rows[f"{millions:g}M"]["vllm_seconds"] = measure_vllm(
                    millions, Path(directory), arguments.rounds
                )
    for size, row in rows.items():
        print(f"\n{size}: {row['parameters']:,} parameters, float32")
        for name in ("memory", "checkpoint", "collective"):
            r = row[name]
            vllm = row.get("vllm_seconds", {}).get(name)
            print(
                f"  {name:<12}{r['seconds']:8.3f} s {r['gb_per_s']:6.2f} GB/s, floor "
                f"{r['floor_gb_per_s']:6.2f} GB/s: {r['ratio']:.2f}, copied "
                f"{r['copied_ratio']:.2f}" + ("" if vllm is None else f"; to vLLM {vllm:.3f} s")
            )
    nearest = rows[f"{min(arguments.millions, key=lambda m: abs(m - 100)):g}M"]
    ratios = {name: nearest[name]["ratio"] for name in ("memory", "checkpoint", "collective")}
    report("sync", ratios | {"sizes": rows}, arguments.save)


if __name__ == "__main__":
    main()
