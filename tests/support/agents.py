"""Provide engines, environments and tools for agents that are tested."""

import asyncio
from dataclasses import replace

from lightning_rl.agents.base import Environment, Reply
from lightning_rl.agents.templates import HermesParser, ParsedCall
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Prompt
from tests.support.engine_checks import FakeEngine


class Hashing(FakeEngine):
    """Writes tokens that follow from prompt, sampling and seed, in a number of ticks that does too.

    ``written`` holds what it wrote, by seed; ``asked`` the prompts, in the order of asking.
    """

    max_length = 64

    def __init__(self, **scripted: Completion) -> None:
        self.written: dict[int, Completion] = {}
        self.asked: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.reasons = scripted.get("reasons", {})

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.asked.append(list(token_ids))
        self.samplings.append(sampling)
        number = hash((tuple(token_ids), seed, sampling.temperature))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        count = min(sampling.max_tokens, number // 5 % 5)
        tokens = [number // 7**n % 4 for n in range(count)]
        made = Completion(
            tokens,
            [-(number // 11**n % 100) / 100 for n in range(count)],
            self.reasons.get(len(self.asked), "stop"),
            [number // 13**n % 3 for n in range(count)],
        )
        self.written[seed] = replace(made, token_ids=list(tokens))
        return made


class Scripted(FakeEngine):
    """Writes given turns, one per request, cut at the request's limit; notes what it was asked."""

    version = 7

    def __init__(self, turns: list[list[int]], max_length: int = 100) -> None:
        self.turns = list(turns)
        self.max_length = max_length
        self.requests: list[tuple[list[int], Sampling, int]] = []

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.require_room(len(token_ids), sampling)
        self.requests.append((list(token_ids), sampling, seed))
        written = self.turns.pop(0)
        reason = "stop" if len(written) <= sampling.max_tokens else "length"
        written = written[: sampling.max_tokens]
        return Completion(written, [-0.5] * len(written), reason, [7] * len(written))


class Sums(Environment):
    """Says the sum of all digits so far, pays 0.25 a turn; done at ``goal``, which pays 1 more."""

    def __init__(self, prompt: Prompt, goal: int = 9) -> None:
        self.goal = goal
        self.sum = 0

    def step(self, turn: str) -> Reply:
        self.sum += sum(int(digit) for digit in turn if digit.isdigit())
        if self.sum >= self.goal:
            return Reply("=", reward=1.25, done=True)
        return Reply(f"={self.sum}", reward=0.25)


def long_game(prompt: Prompt) -> Environment:
    return Sums(prompt, goal=200)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def tool_calls(asked) -> list[dict]:
    """Return calls given as (name, arguments), as a message has them."""
    return [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(asked)
    ]


class AlwaysCalls(HermesParser):
    """Reads a call into whatever a random model writes."""

    def parse(self, text):
        _, calls = super().parse(text)
        return text, calls or [ParsedCall("add", {"a": 12, "b": 1})]


class ShortTurns:
    """Ends an engine's turns after 12 tokens, since a random model hardly ever ends one."""

    async def generate(self, token_ids, sampling, seed):
        completion = await super().generate(token_ids, replace(sampling, max_tokens=12), seed)
        completion.finish_reason = "stop"
        return completion
