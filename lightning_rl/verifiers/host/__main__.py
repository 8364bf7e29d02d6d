"""Hosts a verifiers environment: `python DIRECTORY`, under the environment's own interpreter.

Its dependencies and the trainer's need not agree, so this imports verifiers and the standard
library, and nothing of lightning_rl. Orders come on standard input and answers go to standard
output, one JSON object a line. The first order is the environment's configuration; then

    {"id": 3, "list": {"skip": 0, "limit": 100, "to": FILE}} -> {"id": 3}; a task a line there
    {"id": 4, "run": TASK, "base_url": ..., "api_key": ...}  -> {"id": 4, "traces": [...], ...}
    {"id": 4, "cancel": true}                                (no answer)

When standard input closes, what runs is cancelled and the environment's own servers end: a worker
does not outlive the trainer.
"""

import asyncio
import importlib.metadata
import itertools
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from typing import IO, Any

_LEAST = (0, 4)  # from here on environments are tasksets, and players of any kind programs
_LONGEST = 2**28  # bytes of one order

CHAT = "lightning_rl_chat"
"""The harness for seats without a chosen one: the module next to this file."""


class Host:
    """An environment and its running orders."""

    def __init__(self, env: Any, answer: Callable[..., None]) -> None:
        self.env = env
        self.answer = answer
        self.task_class = type(env.taskset).task_type()
        self.running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, orders: AsyncIterator[dict[str, Any]]) -> None:
        """Carry out orders until there are no more."""
        async with self.env.serving():
            self.answer(ready=importlib.metadata.version("verifiers"), seats=seats_of(self.env))
            try:
                async for order in orders:
                    self.take(order)
            finally:
                running, self.running = [*self.running.values()], {}
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def take(self, order: dict[str, Any]) -> None:
        """Start an order, or cancel the one it names."""
        number = order["id"]
        if "cancel" in order:
            if (task := self.running.pop(number, None)) is not None:
                task.cancel()
            return
        task = self.running[number] = asyncio.create_task(self.carry_out(order))
        task.add_done_callback(lambda _: self.running.pop(number, None))

    async def carry_out(self, order: dict[str, Any]) -> None:
        try:
            if "list" in order:
                await asyncio.to_thread(self.write_tasks, **order["list"])
                self.answer(id=order["id"])
            else:
                self.answer(id=order["id"], **await self.run(order))
        except asyncio.CancelledError:
            if order["id"] in self.running:  # not by us, and somebody waits
                self.answer(id=order["id"], error="CancelledError: by the environment itself")
            raise
        except Exception as error:  # an author's code may raise anything
            traceback.print_exc()
            self.answer(id=order["id"], error=told(type(error).__name__, str(error)))

    def write_tasks(self, skip: int, limit: int | None, to: str) -> None:
        """Write the data of up to ``limit`` tasks; without a limit, of all of a finite taskset."""
        taskset = self.env.taskset
        if limit is None and not taskset.bounded:
            raise ValueError("this taskset never ends; set limit")
        stop = None if limit is None else skip + limit
        with open(to, "w", encoding="utf-8") as file:
            for task in itertools.islice(taskset, skip, stop):
                data = task.data.model_dump(mode="json", exclude_defaults=True)
                print(json.dumps(data), file=file)

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Play one task and return its outcome."""
        from lightning_rl_client import Keyring
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        data = self.task_class.data_type().model_validate(order["run"])
        task = self.task_class(data, self.env.config.taskset.task)
        client = EvalClientConfig(base_url=order["base_url"], api_key_var="")
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        (slot,) = self.env.slots(task)
        keys = Keyring(order["api_key"])
        try:
            return outcome(await self.env.run_slot(slot, context, on_trace=keys.add))
        finally:
            keys.clear()


def outcome(episode: Any) -> dict[str, Any]:
    """Return what a trainer needs to know about an episode, as primitives."""
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    failed = "the episode failed, and the environment gave no reason"
    if errors:
        failed = told(errors[-1].type, errors[-1].message)
    return {
        "error": None if episode.ok else failed,
        "traces": [
            {
                "seat": trace.agent.name,
                "trainable": trace.agent.trainable,
                "reward": trace.reward,
                "rewards": {n: r.score for n, r in trace.rewards.items() if r is not None},
                "metrics": {n: value for n, value in trace.metrics.items() if value is not None},
                "turns": trace.num_turns,
                "stop": trace.stop_condition,
            }
            for trace in episode.traces
        ],
    }


def told(kind: str, message: str) -> str:
    """Return an error as one line, cut to its end if it is long."""
    line = " ".join(message.split())
    return f"{kind}: {line if len(line) < 500 else '... ' + line[-500:]}"


def seats_of(env: Any) -> list[str]:
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(env.config))


def load(options: dict[str, Any]) -> Any:
    """Load the environment, with defaults that suit a trainer.

    verifiers' own defaults are a paid sandbox as the runtime, and a program with a shell as the
    harness. If there are several seats, each asks for a model named after it.
    """
    version = importlib.metadata.version("verifiers")
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST:
        raise ImportError(f"verifiers is {version} here; install 'verifiers>=0.4'")
    import lightning_rl_client
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        load_environment,
        resolve_env_config,
    )

    lightning_rl_client.install()
    config = resolve_env_config(options)
    seats = agent_config_fields(config)
    bare = default_harness_id(config.taskset.id) == "bash"
    chosen = dict(options)
    for name, seat in seats.items():
        settings = chosen[name] = dict(options.get(name) or {})
        if "runtime" not in seat.model_fields_set:
            settings["runtime"] = {"type": "subprocess"}
        if seat.harness is None and bare:
            settings["harness"] = {"id": CHAT}
        if seat.model is None and len(seats) > 1:
            settings["model"] = name
    return load_environment(resolve_env_config(chosen))


async def orders_of(stream: IO[bytes]) -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=_LONGEST)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, stream)
    while line := await reader.readline():
        yield json.loads(line)


async def main(stdin: IO[bytes], stdout: IO[str]) -> None:
    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=stdout, flush=True)

    orders = orders_of(stdin)
    options = await anext(orders)
    try:
        host = Host(load(options), answer)
    except Exception as error:  # an author's code may raise anything
        traceback.print_exc()
        answer(refused=told(type(error).__name__, str(error)))
    else:
        await host.serve(orders)


if __name__ == "__main__":
    # What an environment prints must not be read as an answer, nor may it read orders.
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(*streams))
