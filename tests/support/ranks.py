"""Run functions in worlds: processes of one group that stay alive."""

import gc
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.support import forked
from lightning_rl.engines.replicas.server_process import free_port

SECONDS = 280
"""The longest time of one function, less than pytest gives the test that asked for it."""


def environment_of(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets for each of its processes, but for a port."""
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
    }  # fmt: skip


class World:
    """Processes that run functions together, as if torchrun had started them for each.

    They are started for the first function. When one fails, dies or takes too long, all are ended,
    the others' output is in the error, and the next function gets new ones.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = TemporaryDirectory()
        self._outputs = [Path(self._folder.name, f"output_{rank}") for rank in range(ranks)]
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Return what a module's function returns in each process, by rank."""
        if not self._processes:
            self._start()
        port = free_port()
        try:
            for connection in self._connections:
                connection.send((port, function, arguments, options))
            return self._answers()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        for rank, output in enumerate(self._outputs):
            output.unlink(missing_ok=True)
            ours, theirs = Pipe()
            environment = environment_of(rank, self.ranks)
            self._processes.append(forked.begun(_serve, [theirs], output, environment))
            self._connections.append(ours)
            theirs.close()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + SECONDS
        while len(answers) < self.ranks:
            left = [rank for rank in range(self.ranks) if rank not in answers]
            connections = [self._connections[rank] for rank in left]
            ready = wait(connections, max(0.0, until - time.monotonic()))
            if not ready:
                self._fail(f"ranks {left} took more than {SECONDS} seconds")
            for rank in left:
                if self._connections[rank] in ready:
                    answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int) -> Any:
        try:
            answer = self._connections[rank].recv()
        except EOFError:
            self._fail(f"rank {rank} died")
        if isinstance(answer, _Failed):
            self._fail(f"rank {rank} failed")
        return answer

    def _fail(self, why: str) -> NoReturn:
        wait([process.sentinel for process in self._processes], 1)  # they may have more to say
        said = [output.read_text(errors="replace")[-3000:] for output in self._outputs]
        raise AssertionError("\n\n".join([f"{why}; what all ranks have printed:", *said]))

    def end(self, seconds: float = 0.0) -> None:
        """End the processes, which have so many seconds to tidy up."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(seconds)
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(10.0)
        self._folder.cleanup()


class Together:
    """Calls in several processes or in this one, each made once for all tests that ask for it.

    A function that has a parameter ``where`` is given a folder of its own, unless it was named.
    """

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._worlds: dict[int, World] = {}
        self._results: dict[str, Any] = {}

    def __call__(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> list[Any]:
        """Return what each of so many processes returned, by rank."""
        if ranks not in self._worlds:
            self._worlds[ranks] = World(ranks)
        results: list[Any] = self._once(ranks, self._worlds[ranks], function, arguments, options)
        return results

    def alone(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what this process returned."""

        def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)

        return self._once(0, call, function, arguments, options)

    def _once(self, ranks: int, run: Any, function: Any, arguments: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        key = repr((ranks, name, arguments, sorted(options.items())))
        if key not in self._results:
            if "where" in signature(function).parameters:
                options = {"where": self._make_folder(function.__name__)} | options
            self._results[key] = run(function, *arguments, **options)
        return self._results[key]

    def end(self) -> None:
        for world in self._worlds.values():
            world.__exit__()


class _Failed:
    """The answer of a rank whose function has raised something; it has printed what."""


def _serve(connection: Connection) -> None:
    """Run what comes, in one of the processes, until the other end is closed."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while True:
        try:
            port, function, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            with _as_at_first(port):
                answer = function(*arguments, **options)
        except BaseException:
            traceback.print_exc()
            answer = _Failed()
        connection.send(answer)


@contextmanager
def _as_at_first(port: int) -> Iterator[None]:
    """Restore the state in which a process starts; what a function changes of it is undone.

    A process group of the function before is given up now, when no rank waits for another in it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    os.environ["MASTER_PORT"] = str(port)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what a run may use
    torch.manual_seed(0)
    environment, folder, path = os.environ.copy(), Path.cwd(), list(sys.path)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        for number, handler in signals.items():
            signal.signal(number, handler)
