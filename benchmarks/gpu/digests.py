"""Compare digests of weights on a GPU and a CPU, and measure what share of a push they take."""

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import milliseconds, settle
from benchmarks.gpu.engines import policy_of
from benchmarks.gpu.made import model_of
from lightning_rl import MemoryTransport, TransformersEngine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.run.clock import StageClock
from lightning_rl.run.digest import CHUNK, digest, digests
from lightning_rl.sync.base import push as push_weights
from lightning_rl.sync.sent import SentWeights

SHAPES = ((3,), (5, 7), (CHUNK * 8 + 1,), (129, 65))
"""A padded word, odd sizes, more than a chunk."""


def cost(bench: Bench) -> None:
    """Check digests on both devices; measure gigabytes per second and the share of a push."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        for shape in SHAPES:
            tensor = torch.randn(shape, device="cpu").to(dtype)
            same = digest(tensor) == digest(tensor.to(bench.device))
            bench.require(same, f"{dtype} {shape}: the devices' digests differ")
    model = model_of(bench, "0.5B")
    policy = policy_of(bench, model, seed=1)
    weights = [(name, weight.bfloat16()) for name, weight in policy.named_weights()]
    copies = [torch.empty_like(weight) for _, weight in weights]
    size = sum(weight.nbytes for _, weight in weights)

    def copy() -> None:
        for target, (_, weight) in zip(copies, weights, strict=True):
            target.copy_(weight)

    reading, copying = milliseconds(bench, lambda: digests(weights)), milliseconds(bench, copy)
    bench.note({"GiB": size / 2**30, "ms": reading, "ms of a copy": copying})
    bench.note({"GB/s": size / reading / 1e6})
    share = _share_of_push(bench, model)
    bench.note({"share of a push": share})


def _share_of_push(bench: Bench, model: Path, pushes: int = 5) -> float:
    """Push within one process, to an engine with weights of its own: no push can cost less."""
    policy = policy_of(bench, model, seed=2)
    engine = TransformersEngine("bfloat16", device=bench.device)
    clock = StageClock()
    sent, transport = SentWeights(clock), MemoryTransport()
    shares = []
    with tempfile.TemporaryDirectory() as skeleton:
        save_skeleton(str(model), skeleton)
        engine.start(Path(skeleton))
    try:
        transport.connect(engine)
        for version in range(pushes):
            clock.take()
            settle(bench)
            begin = time.perf_counter()
            push_weights(transport, engine, policy, version, sent)
            settle(bench)
            shares.append(clock.take()["digests"] / (time.perf_counter() - begin))
        transport.close()
    finally:
        engine.close()
    return sorted(shares)[pushes // 2]
