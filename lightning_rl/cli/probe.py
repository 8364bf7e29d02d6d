"""A few seconds of a run in several layouts, each in processes forked off this one.

They have imported all that this one has, so a try takes little more than its iterations; and what
they compute, draw or break, this one never sees.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import distributed

from lightning_rl.agents.base import SingleTurn
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.server_process import free_port
from lightning_rl.learn.own_loop import FabricDDP
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from lightning_rl.run.layout_cache import Seconds
from lightning_rl.run.machine import memory_bytes

MOST_TOKENS = 32
"""Of a completion: longer ones go on in the same way."""
SHARE_S, TIMES = 0.8, 2
"""About so long, and so often, a layout computes a share of the batch; the faster one counts."""


@dataclass(frozen=True)
class Trial:
    """What is computed: parts of a configuration, in some processes of some threads each."""

    model: dict[str, Any]
    data: dict[str, Any]
    precision: str
    processes: int
    threads: int
    most_processes: int
    """Of all trials: a share of the batch has groups for each of them."""


def measure(
    trials: dict[str, Trial], seconds: float, memory: int | None = None
) -> dict[str, Seconds]:
    """Seconds per iteration of those that were over within the time, by name."""
    deadline = time.monotonic() + seconds
    found: dict[str, Seconds] = {}
    groups, largest = 0, 0
    for name, trial in trials.items():
        if trial.processes * largest > (memory or memory_bytes()) // 2:
            continue  # it would need too much memory
        answer = _in_processes(trial, groups, deadline)
        if answer is None:
            continue
        groups, largest = answer.pop("groups"), max(largest, answer.pop("bytes"))
        found[name] = {"iteration": answer["iteration"], "generate": answer["generate"]}
    return found


def _in_processes(trial: Trial, groups: int, deadline: float) -> dict[str, Any] | None:
    """What rank 0 tells; None if it fails, or is not over in time."""
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe(duplex=False)
    port = free_port()
    ranks = [
        forking.Process(target=_compute, args=(trial, rank, port, groups, theirs), daemon=True)
        for rank in range(trial.processes)
    ]
    try:
        for process in ranks:
            process.start()
        theirs.close()
        wait([ours], max(0.0, deadline - time.monotonic()))
        answer: dict[str, Any] | None = ours.recv() if ours.poll() else None
        return answer
    except EOFError:  # it failed: the run itself will tell why, if that matters to it
        return None
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
        ours.close()


def _compute(trial: Trial, rank: int, port: int, groups: int, answers: Connection) -> None:
    """In a process of its own."""
    torch.set_num_threads(trial.threads)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(trial.processes),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        answer = _timed(trial, rank, groups)
        if rank == 0:
            answers.send(answer)
        answers.close()


def _timed(trial: Trial, rank: int, groups: int) -> dict[str, Any]:
    several = trial.processes > 1
    fabric = Fabric(
        accelerator="cpu",
        devices=trial.processes,
        strategy=FabricDDP(cluster_environment=LightningEnvironment()) if several else "auto",
        precision=trial.precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    module, data = _built(trial)
    module.prepare(fabric)
    tokenizer = data.load_tokenizer(module)
    data.train_prompts.load(tokenizer, data.agent.chat_options)
    whole = data.groups_per_iteration
    least = min(whole, trial.most_processes * module.minibatches)
    prompts = list(islice(cycle(data.train_prompts.first(whole)), whole))
    sampling = replace(
        data.sampling, max_tokens=min(data.sampling.max_tokens, MOST_TOKENS), min_tokens=0
    )
    with _engine(module, data, trial.precision) as engine:
        pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([_in_turns]), tokenizer)

        def iterate(count: int) -> Seconds:
            if several:
                distributed.barrier()
            begin = time.perf_counter()
            module.sync_weights(engine)
            at = time.perf_counter()
            rollouts = pipeline.run(
                prompts[rank : count : trial.processes], data.group_size, sampling
            )
            generated = time.perf_counter() - at
            module.fit(rollouts)
            share = count / whole
            taken = time.perf_counter() - begin
            return {"iteration": taken / share, "generate": generated / share}

        iterate(least)  # warms up
        if not groups:
            taken = iterate(least)["iteration"] * least / whole
            groups = min(whole, least * max(1, int(SHARE_S / taken)))
        rows = [iterate(groups) for _ in range(TIMES)]
    peak = getrusage(RUSAGE_SELF).ru_maxrss * 1024
    best = min(rows, key=lambda row: row["iteration"])
    return {**best, "groups": groups, "bytes": peak}


def _built(trial: Trial) -> tuple[PolicyModule, RLDataModule]:
    parser = LightningArgumentParser()
    # As LightningCLI does, which lets optimizers of others go without types.
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parsed = parser.parse_object({"model": trial.model, "data": trial.data})
    parts = parser.instantiate_classes(parsed)
    return parts.model, parts.data


@contextmanager
def _engine(
    module: PolicyModule, data: RLDataModule, precision: str
) -> Iterator[TransformersEngine]:
    given = data.engine
    engine = given if isinstance(given, TransformersEngine) else TransformersEngine()
    engine.follow_dtype("bfloat16" if precision.startswith("bf16") else "float32")
    with tempfile.TemporaryDirectory() as directory:
        module.save_skeletons(directory)
        engine.start(Path(directory))
    try:
        yield engine
    finally:
        engine.close()


def _in_turns(completions: Sequence[Any], **columns: Any) -> list[float]:
    """In place of the run's own rewards, which may cost something: no group is worth the same."""
    return [float(place % 2) for place in range(len(completions))]
