"""What does an agent lose by asking over HTTP, instead of asking the engine?

    OMP_NUM_THREADS=1 python -m benchmarks.agent_server [--save]

The quickstart's model in vLLM, and chats of its prompts, in groups of eight rollouts as a run has
them: through AgentServer, from a client in a process of its own, and then the very same requests
(prompts, seeds, settings) through engine.generate; in turn, one and 64 at once. Both write the same
tokens, which is checked. The last line is JSON with `ratio_1` and `ratio_64`: the median of
seconds, engine / server, so the share of the engine's tokens per second that an agent gets; goal:
>= 0.9. `short_1` and `short_64` are of answers of `--short` tokens, in which the engine has least
to do per request.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.results import parser_of, report
from benchmarks.support.task import GROUP_SIZE, MODEL, make_prompts, prepare
from lightning_rl import Rollout, Sampling, VLLMLocal
from lightning_rl.engines.base import Engine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.serving import AgentServer

TEMPLATE = "{{ messages[-1].content }}"
"""Chats as the quickstart writes its prompts."""
PER_SESSION = 8
"""Requests of a rollout, one after another."""


class Client:
    """The process that sends requests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def run(self, port: int, queues: list[list[tuple[str, str]]]) -> dict[str, Any]:
        """Return the seconds and texts of all requests."""
        return await asyncio.to_thread(self._run, {"port": port, "queues": queues})

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


def start_engine(policy: Policy, directory: Path) -> Engine:
    save_skeleton(str(MODEL), directory)
    engine = VLLMLocal(max_model_len=64)
    engine.start(directory)
    engine.load_weights(policy.named_weights(), 0)
    return engine


async def served(
    server: AgentServer, client: Client, engine: Engine, sampling: Sampling, prompts: list[Any]
) -> tuple[float, list[Rollout]]:
    """Return the seconds of one rollout per list of prompts, side by side, and the rollouts."""
    rollouts = [
        Rollout(queue[0], str(number), 0, number, sampling.distribution)
        for number, queue in enumerate(prompts)
    ]
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(server.session(rollout, engine, sampling))
            for rollout in rollouts
        ]
        queues = [
            [(session.api_key, request(prompt.prompt)) for prompt in queue]
            for session, queue in zip(sessions, prompts, strict=True)
        ]
        port = int(server.url.rpartition(":")[2])
        told = await client.run(port, queues)
    return told["seconds"], rollouts


def request(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "policy", "messages": messages})


async def direct(engine: Engine, sampling: Sampling, rollouts: list[Rollout]) -> float:
    """Return the seconds of the same requests; raise unless the same tokens come."""

    async def ask(rollout: Rollout) -> None:
        for call in rollout.calls:
            row = rollout.rows[call.row]
            prompt = row.prompt_ids + row.token_ids[: call.start]
            completion = await engine.generate(prompt, sampling, call.seed)
            if completion.token_ids != row.token_ids[call.start : call.stop]:
                raise RuntimeError("the engine wrote other tokens than through the server")

    begin = time.perf_counter()
    await asyncio.gather(*map(ask, rollouts))
    return time.perf_counter() - begin


async def compare(
    server: AgentServer, client: Client, engine: Engine, tokens: int, at_once: int, rounds: int
) -> dict[str, float]:
    """Return medians over rounds, of which the first warms up."""
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens)
    prompts = make_prompts(seed=0)
    prompts.load(server.tokenizer)
    ratios, seconds = [], []
    for number in range(rounds + 1):
        groups = [prompts.draw(PER_SESSION) for _ in range(-(-at_once // GROUP_SIZE))]
        queues = [groups[place // GROUP_SIZE] for place in range(at_once)]
        through, rollouts = await served(server, client, engine, sampling, queues)
        straight = await direct(engine, sampling, rollouts)
        if number:
            ratios.append(straight / through)
            seconds.append(through - straight)
    requests = at_once * PER_SESSION
    return {
        "ratio": statistics.median(ratios),
        "ms": 1000 * statistics.median(seconds) / requests,
    }


async def measure(
    server: AgentServer, client: Client, engine: Engine, arguments: Any
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, tokens in (("ratio", arguments.tokens), ("short", arguments.short)):
        for at_once, rounds in ((1, 2 * arguments.rounds), (64, arguments.rounds)):
            found = await compare(server, client, engine, tokens, at_once, rounds)
            result |= {f"{name}_{at_once}": found["ratio"], f"{name}_{at_once}_ms": found["ms"]}
            print(f"{tokens:>4} tokens, {at_once:>2} at once: {found}")
    await server.close()
    return result


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--rounds", type=int, default=8, help="of 64 at once; twice as many of one")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--short", type=int, default=8, help="of a short answer")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare()
    policy = Policy(str(MODEL))
    tokenizer = policy.tokenizer
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as directory:
        engine, client = start_engine(policy, Path(directory)), Client()
        try:
            result = run_async(measure(AgentServer(tokenizer), client, engine, arguments))
        finally:
            client.close()
            engine.close()
    result |= {"tokens": arguments.tokens, "short": arguments.short}
    report("agent-server", result, arguments.save)


if __name__ == "__main__":
    main()
