"""Check GPUs that compute micro-batches together: one's scores and gradients, and a push to many.

Skipped where there are too few GPUs; a trial on a CPU has two processes over gloo.
"""

import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.clock import settle
from benchmarks.gpu.engines import policy_of
from benchmarks.gpu.made import model_of
from benchmarks.parallel.kinds import KINDS, relative
from benchmarks.parallel.layouts import DEVICE
from benchmarks.parallel.ranks import measure
from lightning_rl import VLLMServer
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.sync.base import push as push_weights
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.ranks import World

CLOSE, CLOSE_IN_FLOAT32 = 1e-9, 1e-4
"""The tolerance to one GPU's scores and gradients, whose sums are in another order."""


def equal(bench: Bench, kind: str) -> None:
    """Compare scores and gradients by layout and feature, in float64 and once in float32."""
    ranks = 4 if _gpus(bench, 2) >= 4 else 2
    features = KINDS[kind].features[:1] if bench.tiny else KINDS[kind].features
    layouts = KINDS[kind].layouts[ranks]
    wanted = [f"{layout}_{feature}" for layout in layouts for feature in features]
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, {DEVICE: bench.device}):
        model = KINDS[kind].save(Path(name) / "model")
        with World(ranks) as world:
            for scenario in wanted:
                close = CLOSE_IN_FLOAT32 if scenario.endswith("float32") else CLOSE
                found = world(measure, str(model), scenario)
                scores, gradients = map(max, zip(*map(relative, found), strict=True))
                bench.note({scenario: {"scores": scores, "gradients": gradients}})
                off = max(scores, gradients)
                bench.require(off < close, f"{scenario} on {ranks}: {off:.2g} off, above {close:g}")


def shared_push(bench: Bench) -> None:
    """Broadcast once to several servers, each on a GPU of its own, and digest what they hold."""
    replicas = 1 if bench.tiny else min(3, _gpus(bench, 3) - 1)
    devices = None if bench.tiny else [str(1 + place) for place in range(replicas)]
    model = model_of(bench, "small")
    engine = VLLMServer(
        dtype="bfloat16", replicas=replicas, devices=devices, max_model_len=256, kv_cache_gb=0.05
    )
    transport, sent = CollectiveTransport(), SentWeights()
    with tempfile.TemporaryDirectory() as skeleton:
        save_skeleton(str(model), skeleton)
        engine.start(Path(skeleton))
    try:
        transport.connect(engine)
        for version in range(3):
            policy = policy_of(bench, model, seed=version)
            settle(bench)
            begin = time.perf_counter()
            compared = push_weights(transport, engine, policy, version, sent)
            bench.note({f"push {version} s": time.perf_counter() - begin, "compared": compared})
            bench.require(compared, f"push {version}: no tensor was compared")
        transport.close()
    finally:
        engine.close()


def _gpus(bench: Bench, least: int) -> int:
    """Return the number of GPUs; in a trial run, the smallest that suffices.

    Raises:
        Skipped: if they are fewer.
    """
    if bench.tiny:
        return least
    count = torch.cuda.device_count()
    if count < least:
        raise Skipped(f"it takes {least} GPUs, and there is {count}")
    return count
