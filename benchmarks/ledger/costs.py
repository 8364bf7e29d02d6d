"""Measure the share of a push that its digests take."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.ledger.trials import Pushes, prepared
from benchmarks.sync.transports import make_config
from lightning_rl.engines.base import Engine


def cost(make: Callable[[], Engine], millions: float, rounds: int) -> dict[str, float]:
    """Return seconds of a push and of its digests, and what share these have."""
    config = make_config(millions)
    with prepared(config) as (policy, skeleton), closing(make()) as engine, noted() as notes:
        engine.start(skeleton)
        pushes, rows = Pushes(policy, engine), []
        for _ in range(rounds + 1):
            pushes.move()
            pushes.clock.take()
            notes.clear()
            begin = time.perf_counter()
            pushes.send()
            whole = time.perf_counter() - begin
            digests = pushes.clock.take()["digests"] + sum(notes)
            rows.append((whole, digests, digests / whole))
        pushes.transport.close()
    whole, digests, share = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    count = sum(parameter.numel() for parameter in policy.parameters())
    return {"parameters": count, "push_s": whole, "digests_s": digests, "share": share}


@contextmanager
def noted() -> Iterator[list[float]]:
    """Yield seconds that vLLM in this process takes to note what it converts."""
    from lightning_rl.engines.vllm import held_digests as vllm_held

    seconds: list[float] = []
    reading, converting = vllm_held.digests, [False]

    def timed(tensors: Any) -> dict[str, str]:
        begin = time.perf_counter()
        found = reading(tensors)
        if converting[0]:
            seconds.append(time.perf_counter() - begin)
        return found

    convert = vllm_held._convert

    def watched(*arguments: Any) -> None:
        converting[0] = True
        try:
            convert(*arguments)
        finally:
            converting[0] = False

    with patch.object(vllm_held, "digests", timed), patch.object(vllm_held, "_convert", watched):
        yield seconds
