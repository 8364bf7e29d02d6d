"""Kill a run's vLLM servers at random moments, and compare it with a run that was left alone.

    python -m benchmarks.kill_engines --kills 20 [--engines 2] [--leave 0.25] [--save]

The run is ``lightning-rl fit`` on the sort-digits task, with servers of somebody else's that are
listed in a file (``ServersInFile``). As long as it goes on, one of them is killed (SIGKILL, all of
its processes) as soon as all have served for a random time; or, for a share of the times, is taken
out of the file first, as a spot machine that is given notice. Another one joins at another address.
Meanwhile requests go to whoever is left, or wait.

"equal" means: every rollout of every iteration, token by token with its logprobs, and the final
weights and optimizer, by ``torch.equal``. So that logprobs can be equal to the last bit, a server
computes one request at a time and caches no prefix: a matrix product over more rows is summed in
another order. With ``--batched`` servers work as they do by default, and logprobs are compared
within ``ROUNDING``.

The last line is JSON. ``--save`` keeps it.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kill.compare import differences, lines_of, run_directory
from benchmarks.kill.runs import configuration, folder_of
from benchmarks.support import forked
from benchmarks.support.results import report
from lightning_rl.engines.replicas.server import (
    SERVER_ENVIRONMENT,
    VLLMServer,
    own_cores,
    server_command,
)
from lightning_rl.engines.replicas.server_process import ListeningServer
from recipes.sort_digits.prepare import prepare

KEY = "KILL_ENGINES_KEY"
ROUNDING = 1e-4
"""In nats: of the logprobs of two batches in float32."""
LONGEST_S = 3.0
"""The random time is at most this long: a few iterations."""
PATIENCE_S = 300.0
GRADING_S = 1.0
JOINED = "has joined the engine"
"""The words that the run prints for each server that joins."""


class Servers:
    """The servers that serve at present, and the file in which they are listed."""

    def __init__(self, model: Path, folder: Path, count: int, batched: bool, seed: int) -> None:
        alone: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
        engine = VLLMServer(max_model_len=32, kv_cache_gb=0.05, **({} if batched else alone))
        self._command = server_command(engine.settings.arguments(model, False))
        self._environment = SERVER_ENVIRONMENT | engine.settings.environment()
        self.path = folder / "servers.txt"
        self._random = random.Random(seed)
        self._count = count
        self.check: Callable[[], None] = lambda: None
        """Called while one waits."""
        self._running: dict[str, tuple[int, ListeningServer]] = {}
        for place in range(count):
            self._start(place)
        self._list()

    def _start(self, place: int) -> None:
        environment = self._environment | own_cores(place, self._count)
        environment["VLLM_API_KEY"] = os.environ[KEY]
        server = ListeningServer(self._command, environment)
        self._running[server.url] = place, server

    def _list(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{url}\n" for url in self._running))
        new.replace(self.path)

    def replace_one(self, notice: bool) -> None:
        """Kill one, or take it out of the list first, and have another join."""
        doomed = self._random.choice(list(self._running))
        place, process = self._running.pop(doomed)
        if notice:
            self._list()
            time.sleep(self._random.uniform(0.0, LONGEST_S))
        process.kill()
        self._start(place)
        self._list()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds, and then a random time.

        Raises:
            SystemExit: if it does not within ``PATIENCE_S``, or a server does not start.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.check()
            for url, (_, process) in self._running.items():
                if not process.running:
                    raise SystemExit(f"the server at {url} did not start: {process.tail()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"after {PATIENCE_S:g} s there is no {what}")
            time.sleep(0.1)
        time.sleep(self._random.uniform(0.0, LONGEST_S))
        self.check()

    def close(self) -> None:
        for _, process in self._running.values():
            process.kill()


def take_time(completions: list[Any], **columns: Any) -> list[float]:
    """Return a reward that leaves the cores to servers that start."""
    time.sleep(GRADING_S)
    return [0.0] * len(completions)


def begin(data: Path, out: Path, servers: Servers, iterations: int) -> Any:
    """Begin the run, of so many iterations if nobody stops it."""
    config = configuration(data, out, "SyncCollector", "TransformersEngine")
    # It looks at the engine's logprobs; without it weights depend on tokens alone.
    del config["model"]["init_args"]["correction"]
    rewards = config["data"]["init_args"]["rewards"]
    config["data"]["init_args"] |= {
        "rewards": [*rewards, "benchmarks.kill_engines.take_time"],
        "engine": {
            "class_path": "VLLMServer",
            "init_args": {
                "urls": {"class_path": "ServersInFile", "init_args": {"path": str(servers.path)}},
                "api_key_env": KEY,
                "health_every_s": 0.5,
            },
        },
        "iterations_per_epoch": iterations,
    }
    config["trainer"]["max_epochs"] = 1
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(json.dumps(config))
    arguments = ["fit", "--config", out / "config.yaml"]
    return forked.started("lightning_rl", arguments, out / "output.txt")


def disturbed(data: Path, out: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Kill servers of a run, then stop it; return iterations, and kills with notice.

    Raises:
        SystemExit: if it did not get that far.
    """
    servers = Servers(data / "model", out, options.engines, options.batched, options.seed)
    draw, noticed = random.Random(options.seed), 0
    run = begin(data, out / "run", servers, 100_000)
    log = out / "run" / "output.txt"

    def require_running() -> None:
        if not run.is_alive():
            raise SystemExit(f"the run ended with {run.exitcode}: see {log}")

    servers.check = require_running
    try:
        servers.wait(lambda: list(out.glob("run/run/*/rollouts.jsonl")), f"first iteration: {log}")
        for kill in range(options.kills):
            notice = draw.random() < options.leave
            noticed += notice
            servers.replace_one(notice)
            servers.wait(partial(has_joined, log, kill + 1), f"server that joined: {log}")
            print(f"{kill + 1:>5}  {'left' if notice else 'killed'}", flush=True)
    finally:
        run.terminate()
        run.join()
        servers.close()
    saved = run_directory(out / "run") / "checkpoints"
    return max(int(path.stem.partition("_")[2]) for path in saved.glob("iteration_*.ckpt")), noticed


def has_joined(log: Path, times: int) -> bool:
    """Tell whether so many servers have joined the run that prints to ``log``."""
    return log.read_text().count(JOINED) >= times


def compare(runs: list[Path], iterations: int) -> tuple[list[str], int, float]:
    """Return the differences but for logprobs, the number of rollouts, and the largest gap."""
    states = [torch.load(run / f"checkpoints/iteration_{iterations}.ckpt") for run in runs]
    kept = ("state_dict", "optimizer_states", "lr_schedulers")
    found = [d for name in kept for d in differences(states[0][name], states[1][name], name)]
    largest, rollouts = 0.0, [lines_of(run / "rollouts.jsonl") for run in runs]
    for one, other in zip(*rollouts, strict=True):
        said, expected = ([row.pop("logprobs") for row in line["rows"]] for line in (one, other))
        if differing := differences(one, other, one["id"]):
            found += differing
        else:
            gaps = torch.tensor(said).double() - torch.tensor(expected).double()
            largest = max(largest, float(gaps.abs().max()))
    return found, len(rollouts[0]), largest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--engines", type=int, default=2, help="servers at a time")
    parser.add_argument("--leave", type=float, default=0.25, help="share that is given notice")
    parser.add_argument("--batched", action="store_true", help="servers work as by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs (default: deleted)")
    parser.add_argument("--save", action="store_true", help="keep the last line in results/")
    options = parser.parse_args(arguments)
    os.environ[KEY] = "of the servers that will be killed"
    with folder_of(options.keep, "kill_engines_") as out:
        return measure(options, out)


def measure(options: argparse.Namespace, out: Path) -> int:
    """Measure both runs, print the last line, and return 0 if they are equal."""
    data = out / "data"
    prepare(data)
    (out / "alone").mkdir()
    iterations, noticed = disturbed(data, out, options)
    servers = Servers(data / "model", out / "alone", options.engines, options.batched, 0)
    try:
        run = begin(data, out / "alone" / "run", servers, iterations)
        run.join()
    finally:
        servers.close()
    if run.exitcode != 0:
        raise SystemExit(f"the run that was left alone ended with {run.exitcode}: see {out}/alone")
    runs = [run_directory(out / "run"), run_directory(out / "alone" / "run")]
    found, rollouts, largest = compare(runs, iterations)
    for place in found[:5]:
        print(f"differs: {place}")
    equal = not found and largest <= (ROUNDING if options.batched else 0.0)
    result = {
        "kills": options.kills,
        "with_notice": noticed,
        "engines": options.engines,
        "iterations": iterations,
        "rollouts": rollouts,
        "differences": len(found),
        "logprob_difference": largest,
        "batched": options.batched,
        "equal": equal,
    }
    report("kill-engines", result, options.save)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
