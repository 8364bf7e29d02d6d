"""What do two adapters cost that learn together, over one that learns from as many tokens?

    OMP_NUM_THREADS=1 python -m benchmarks.roles [--save]

The quickstart's model in episodes of two calls, of as many tokens each: both by one LoRA policy
(`PolicyModule`, merged in `VLLMLocal`), or the first by one and the second by another
(`RolesModule`, one base in the trainer and in `VLLMAdapters`). Rewards are drawn by the tokens, so
that all of them are trained on. Each side is a `Trainer.fit` of its own process, with weight sync,
probe and logger; they take turns iteration by iteration. The last line is JSON with `ratio`, the
median of CPU seconds per iteration, two / one; goal: <= 1.25.
"""

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.support.results import parser_of, report_ratio
from benchmarks.support.task import LR, MODEL, fit, make_data, make_module, prepare
from lightning_rl import LoRA, Rollout, Sampling, UpdateSettings, VLLMLocal, WeightSync
from lightning_rl.callbacks import RLCallback
from lightning_rl.engines.base import Engine
from lightning_rl.extend import Agent, Episode, RolloutModule, VLLMAdapters
from lightning_rl.games import RolePolicy, RolesModule

ROLES = ("asks", "answers")
TOKENS, RANK = 10, 8
ENGINE: dict[str, Any] = {"max_model_len": 64, "kv_cache_gb": 0.5}
SAMPLING = Sampling(max_tokens=TOKENS, min_tokens=TOKENS)


class TwoCalls(Agent):
    """The second call reads the prompt and what the first has written."""

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        episode, prompt = Episode(rollout), rollout.prompt.token_ids
        for role in ROLES:
            _, said = await episode.call(engine, prompt, sampling, role)
            prompt = [*prompt, *said.token_ids]
        episode.end()
        return rollout


def drawn(completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Draw a number in [0, 1) for each, as good as at random."""
    return [sum(i * token for i, token in enumerate(ids)) % 97 / 97 for ids in completion_ids]


def one() -> tuple[RolloutModule, Engine]:
    """Build one adapter, which plays both."""
    return make_module(lora=LoRA(rank=RANK), seed=0), VLLMLocal(**ENGINE)


def two() -> tuple[RolloutModule, Engine]:
    """Build an adapter each."""

    def group() -> RolePolicy:
        return RolePolicy(
            lora=LoRA(rank=RANK),
            optimizer=lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, fused=True),
            update=UpdateSettings(seed=0),
        )

    module = RolesModule(str(MODEL), {role: group() for role in ROLES})
    return module, VLLMAdapters(max_lora_rank=RANK, **ENGINE)


SIDES: dict[str, Callable[[], tuple[RolloutModule, Engine]]] = {"one": one, "two": two}


class Turns(RLCallback):
    """Tells the CPU seconds of each iteration, and waits until the next may begin."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.since = 0.0
        self.tokens = 0

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.tokens = sum(sum(rollout.loss_mask) for rollout in rollouts)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self.connection.send((time.process_time() - self.since, self.tokens))
        self.connection.recv()
        self.since = time.process_time()


def train(side: str, iterations: int, threads: int, connection: Connection) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, engine = SIDES[side]()
    data = make_data(iterations, engine, reward=drawn, sampling=SAMPLING, seed=0, agent=TwoCalls())
    fit(module, data, [WeightSync(), Turns(connection)])


def run(iterations: int, warmup: int, threads: int) -> list[dict[str, float]]:
    """Return CPU seconds of both, one row per counted iteration."""
    context = get_context("spawn")
    ends, processes = {}, []
    for side in SIDES:
        ends[side], other = context.Pipe()
        arguments = (side, iterations + warmup, threads, other)
        processes.append(context.Process(target=train, args=arguments, daemon=True))
        processes[-1].start()
        other.close()
    for end in ends.values():
        end.recv()  # it has started, and pushed
    rows = []
    for iteration in range(iterations + warmup):
        told = {}
        for side in sorted(SIDES, reverse=bool(iteration % 2)):
            ends[side].send(None)
            told[side] = ends[side].recv()
        if told["one"][1] != told["two"][1]:
            raise RuntimeError(f"the two sides trained on other numbers of tokens: {told}")
        if iteration >= warmup:
            rows.append({side: seconds for side, (seconds, _) in told.items()})
    for end in ends.values():
        end.send(None)  # it may end
    for process in processes:
        process.join()
    return rows


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    prepare()
    rows = run(arguments.iterations, arguments.warmup, arguments.threads)
    sides = {"two": "two adapters", "one": "one adapter"}
    report_ratio("roles", rows, sides, arguments.threads, arguments.save)


if __name__ == "__main__":
    main()
