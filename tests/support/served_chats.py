"""Provide sessions of an AgentServer whose engine writes given turns, and real clients of them."""

import asyncio
from contextlib import asynccontextmanager
from functools import cached_property

import anthropic
import httpx
import openai

from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.serving.server import AgentServer
from tests.support.engine_checks import FakeEngine
from tests.support.tiny_models import chat_tokenizer

TOKENIZER = chat_tokenizer("qwen3")


END = "<|im_end|>"


QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


TOOLS = [{"type": "function", "function": ADD}]


def encoded(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Script(FakeEngine):
    """Writes given turns, a token per byte; waits before each while it is told to."""

    version = 7

    def __init__(self, *turns, max_length=100_000):
        self.turns = list(turns)
        self.max_length = max_length
        self.requests = []
        self.cancelled = 0
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def generate(self, token_ids, sampling, seed):
        self.requests.append((list(token_ids), sampling, seed))
        turn = self.turns.pop(0)
        try:
            await self.may_write.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(turn, Exception):
            raise turn
        tokens = encoded(turn)
        for stop in sampling.stop:
            if stop in turn:
                tokens = encoded(turn[: turn.index(stop) + len(stop)])
        reason = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens = tokens[: sampling.max_tokens]
        logprobs = [-0.5 - i for i in range(len(tokens))]
        return Completion(tokens, logprobs, reason, [self.version] * len(tokens))


def new_rollout(prompt=QUESTION):
    return Rollout(Prompt("p", prompt, [1, 2]), "g", 0, seed=11)


class Desk:
    """An open session with an engine that has turns to say, and clients of it."""

    def __init__(self, session, engine, server=None):
        self.server, self.session, self.engine = server, session, engine
        self.rollout = session.episode.rollout
        self._key = {"api_key": session.api_key, "max_retries": 0}

    @cached_property
    def openai(self):
        http = openai.DefaultAsyncHttpxClient(verify=False)  # certificates take long to read
        url = self.session.base_url
        return openai.AsyncOpenAI(base_url=url, http_client=http, **self._key)

    @cached_property
    def anthropic(self):
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        url = self.session.anthropic_url
        return anthropic.AsyncAnthropic(base_url=url, http_client=http, **self._key)

    async def close(self):
        for name in {"openai", "anthropic"} & self.__dict__.keys():
            await self.__dict__[name].close()

    async def chat(self, messages=QUESTION, **options):
        return await self.openai.chat.completions.create(
            model="policy", messages=messages, **options
        )

    async def post(self, path, headers=None, **body):
        """Post without a library in between, on a connection of its own."""
        headers = {"authorization": f"Bearer {self.session.api_key}"} | (headers or {})
        async with httpx.AsyncClient(verify=False) as client:
            url = self.session.base_url + path
            return await client.post(url, json=body, headers=headers, timeout=None)

    @property
    def written(self):
        """Return all that was recorded as a model's, call by call."""
        rows = self.rollout.rows
        return [
            TOKENIZER.decode(rows[call.row].token_ids[call.start : call.stop])
            for call in self.rollout.calls
        ]

    @property
    def asked(self):
        """Return the prompts that the engine read."""
        return [TOKENIZER.decode(tokens) for tokens, _, _ in self.engine.requests]


@asynccontextmanager
async def opened(*turns, sampling=Sampling(max_tokens=5000), roles=(), engine=None, **options):
    engine = engine or Script(*turns)
    server = AgentServer(TOKENIZER, **options)
    try:
        async with server.session(new_rollout(), engine, sampling, roles) as session:
            desk = Desk(session, engine, server)
            yield desk
            await desk.close()
    finally:
        await server.close()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)
