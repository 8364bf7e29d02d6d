"""Measure each cost of `benchmarks.growth` by the size that it grows with."""

import asyncio
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.growth.fits import WORK, Cost
from lightning_rl import (
    GRPO,
    MultiTurn,
    PassRateCurriculum,
    Prompt,
    Rewards,
    Rollout,
    Sampling,
    SingleTurn,
    TransformersEngine,
)
from lightning_rl.agents.base import new_rollouts
from lightning_rl.callbacks.report import draw_curves
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.stats import rollout_metrics
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.data.splitting import split_micro_batches
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion
from lightning_rl.extend import Environment, Episode, Reply
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Row
from lightning_rl.serving import AgentServer
from lightning_rl.serving.function_agent import AgentClient
from recipes.sort_digits.prepare import make_tokenizer, small_qwen2

CHATS = (
    "{% for m in messages %}={{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
ANSWER = 8
"""Tokens of an answer."""
VOCABULARY = 16


class Drawing(Engine):
    """Draws digits by the seed; ``late``: gives answers in an order of its own."""

    version, running, max_length = 0, True, 10**9

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self._waiting: list[asyncio.Future[None]] = []
        self._order = random.Random(0)

    async def generate(self, token_ids: Any, sampling: Sampling, seed: int) -> Completion:
        if self.late:
            await self._turn()
        draw = random.Random(seed)
        tokens = [draw.randrange(3, 13) for _ in range(ANSWER)]
        return Completion(tokens, [-0.5] * ANSWER, "stop", [0] * ANSWER)

    async def _turn(self) -> None:
        """Wait to be drawn; each call draws one of those that wait, once they are four."""
        own = asyncio.get_running_loop().create_future()
        self._waiting.append(own)
        asyncio.get_running_loop().call_soon(self._let_go)
        await own

    def _let_go(self) -> None:
        place = self._order.randrange(len(self._waiting))
        self._waiting.pop(place).set_result(None)

    def start(self, model_dir: Path) -> None: ...

    def load_weights(self, weights: Any, version: int) -> None: ...

    def close(self) -> None: ...


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    made = make_tokenizer()
    made.chat_template = CHATS
    return made


def rollout(prompt: str | list[dict[str, str]] = "") -> Rollout:
    return Rollout(Prompt("0", prompt, [2, 3]), "0", 0, seed=0)


# ---------------------------------------------------------------- agents


def out_of_order_calls(size: int) -> WORK:
    """Run four chats side by side, of so many calls each, and then as many calls at once."""
    sampling = Sampling(max_tokens=ANSWER)

    async def chat(episode: Episode, engine: Engine, prompt: list[int]) -> None:
        for turn in range(size):
            _, completion = await episode.call(engine, prompt, sampling)
            prompt = [*prompt, *completion.token_ids, 2, 3 + turn % 10]

    async def play() -> None:
        episode, engine = Episode(rollout()), Drawing(late=True)
        await asyncio.gather(*(chat(episode, engine, [2, 3, n]) for n in range(4)))
        prompts = [[2, 3, 3 + n % 10, 3 + n % 7] for n in range(size)]
        await asyncio.gather(*(episode.call(engine, prompt, sampling) for prompt in prompts))
        episode.end()

    return lambda: asyncio.run(play())


def session_turns(size: int) -> WORK:
    """Run a chat of so many turns."""

    async def play() -> None:
        server, chat = AgentServer(tokenizer()), [{"role": "user", "content": "12"}]
        sampling = Sampling(max_tokens=ANSWER)
        async with server.session(rollout(), Drawing(), sampling) as session:
            for turn in range(size):
                answer = await session.chat(chat)
                chat += [answer.message, {"role": "user", "content": str(turn)}]
        await server.close()

    return lambda: asyncio.run(play())


def agents_contexts(size: int) -> WORK:
    """Run so many agents, each with a client of the openai package."""

    async def play() -> None:
        server, sampling = AgentServer(tokenizer()), Sampling(max_tokens=ANSWER)
        for _ in range(size):
            async with server.session(rollout(), Drawing(), sampling) as session:
                client = AgentClient(session)
                assert client.openai.base_url.host
                await client.close()
        await server.close()

    return lambda: asyncio.run(play())


# ---------------------------------------------------------------- batches


def group(number: int) -> list[Rollout]:
    """Make four graded rollouts of one prompt, of 4 to 19 tokens."""
    draw = random.Random(number)
    prompt = Prompt(str(number), "", [3 + number % 10, 2])
    rollouts = []
    for index in range(4):
        tokens = [draw.randrange(3, 13) for _ in range(draw.randrange(4, 20))]
        count = len(tokens)
        row = Row(prompt.token_ids, tokens, [True] * count, [-0.5] * count, [0] * count)
        made = Rollout(prompt, str(number), index, number, rows=[row])
        made.reward = float(draw.randrange(2))
        rollouts.append(made)
    return rollouts


def packing(size: int) -> WORK:
    rollouts = [one for number in range(size) for one in group(number)]
    return lambda: split_micro_batches(pack_rollouts(rollouts), 512)


@cache
def tiny_model() -> str:
    """Make a directory with a model of two layers."""
    directory = tempfile.mkdtemp()
    lm = small_qwen2(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=2**14,
    )  # fmt: skip
    lm.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def scoring_packs(size: int) -> WORK:
    policy = Policy(tiny_model())
    batch = pack_rollouts([one for number in range(size) for one in group(number)])
    return lambda: policy.score(batch, "old_logprobs", 256)


def groups_per_batch(size: int) -> WORK:
    """Generate, grade, measure, micro-batch and credit groups."""
    prompts = [Prompt(str(number), "", [3 + number % 10, 2]) for number in range(size)]
    sampling = Sampling(max_tokens=ANSWER)
    pipeline = RolloutPipeline(Drawing(), SingleTurn(), Rewards([sevens]), tokenizer())

    def work() -> None:
        groups = [new_rollouts([p], 4, sampling, 0, 0, n) for n, p in enumerate(prompts)]
        pipeline.complete(groups, sampling)
        rollouts = [one for members in groups for one in members]
        rollout_metrics(rollouts, 1.0, 0)
        GRPO()(pack_rollouts(rollouts))

    return work


def sevens(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("7")) for text in completions]


# ---------------------------------------------------------------- data and the rest


def prompts_drawn(size: int) -> WORK:
    """Draw as many prompts as there are rows."""

    def work() -> None:
        prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(size)], seed=0)
        prompts.load(tokenizer())
        prompts.draw(size)

    return work


def curriculum_drawn(size: int) -> WORK:
    """Draw as many prompts as there are rows, eight at a time, which are graded."""

    def work() -> None:
        rows = IterablePrompts([{"prompt": f"{n}="} for n in range(size)], seed=0)
        prompts = PassRateCurriculum(rows)
        prompts.load(tokenizer())
        for _ in range(0, size, 8):
            drawn = prompts.draw(8)
            prompts.observe(
                [[Rollout(p, p.id, 0, 0, reward=float(p.key[-1] < "5"))] for p in drawn]
            )

    return work


def chat_rows(size: int) -> WORK:
    """Load and measure rows that are chats."""

    def work() -> None:
        rows = [{"prompt": [{"role": "user", "content": f"{n}="}]} for n in range(size)]
        prompts = IterablePrompts(rows, seed=0)
        prompts.load(tokenizer())
        prompts._measure()

    return work


def report_iterations(size: int) -> WORK:
    """Draw the picture of so many iterations."""
    draw = random.Random(0)
    history = [
        {"iteration": float(n), "reward/mean": draw.random(), "time/iteration": draw.random()}
        for n in range(size)
    ]

    def work() -> None:
        figure = draw_curves(history)
        figure.canvas.draw()

    return work


class Answering(Environment):
    """Says the same again and again."""

    def step(self, turn: str) -> Reply:
        return Reply("=12=")


def transformers_turns(size: int) -> WORK:
    """Run four rollouts of so many turns, side by side."""
    engine = TransformersEngine(dtype="float32", device="cpu", kept_tokens=2**14)
    engine.start(Path(tiny_model()))
    engine.load_weights(Policy(tiny_model()).named_weights(), 0)
    agent = MultiTurn(Answering, max_turns=size, max_turn_tokens=ANSWER)
    agent.configure(tokenizer())
    sampling = Sampling(max_tokens=2**13)
    begun = new_rollouts([Prompt("0", "", [2, 3])], 4, sampling, 0, 0)

    async def play() -> None:
        await asyncio.gather(*(agent.run(one, engine, sampling) for one in begun))

    return lambda: asyncio.run(play())


def powers(first: int, last: int, by: int = 2) -> list[int]:
    """Return ``first``, and its multiples up to ``last``."""
    found = [first]
    while found[-1] * by <= last:
        found.append(found[-1] * by)
    return found


def _cost(
    prepare: Callable[[int], WORK], first: int, last: int, by: int = 4, memory: bool = False
) -> Cost:
    return Cost(prepare.__name__, powers(first, last, by), prepare, memory)


torch.set_num_threads(1)
COSTS = [
    _cost(out_of_order_calls, 1, 1024, memory=True),
    _cost(session_turns, 1, 1024, memory=True),
    _cost(agents_contexts, 1, 256, memory=True),
    _cost(scoring_packs, 4, 1024),
    _cost(packing, 4, 4096),
    _cost(prompts_drawn, 64, 65536),
    _cost(curriculum_drawn, 64, 65536),
    _cost(report_iterations, 64, 65536),
    _cost(groups_per_batch, 1, 1024),
    _cost(transformers_turns, 2, 64, by=2),
    _cost(chat_rows, 64, 16384),
]
