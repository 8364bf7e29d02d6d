"""MultiTurn on a real vLLM engine: exact logprobs over turns and weights, resuming, learning."""

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.support.task import KeptEngine
from lightning_rl.agents.base import Environment, Reply
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.callbacks import RunReport, WeightSync
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.rules import EnvironmentReward
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.support.engine_checks import ROUNDING, own_logprobs, plain_model, same_draws
from tests.support.small_run import numbers, trainer_of

pytestmark = pytest.mark.slow

# Longer than a cache block of 32 tokens, so that turns really go on from cached prefixes.
PROMPT = [3 + i % 10 for i in range(40)]


class Echo(Environment):
    """Says a turn backwards after "="; pays for sevens."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, turn: str) -> Reply:
        return Reply(f"={turn[::-1]}", reward=turn.count("7") / 6)


@pytest.fixture(scope="module")
def engine(skeleton):
    engine = KeptEngine(max_model_len=128, kv_cache_gb=0.05)
    engine.start(skeleton)
    yield engine
    engine.end()


@pytest.fixture
def agent(tiny_model):
    def make(environment=Echo, **limits):
        agent = MultiTurn(environment, **{"max_turns": 4, "max_turn_tokens": 6} | limits)
        agent.configure(AutoTokenizer.from_pretrained(tiny_model))
        return agent

    return make


def new(seed: int) -> Rollout:
    return Rollout(Prompt("p", "text", PROMPT), "g", 0, seed)


def logprobs_of(tiny_model, weights, rollout) -> list[float]:
    """Return the logprobs of all tokens after the prompt, by transformers."""
    plain = plain_model(tiny_model, weights)
    return own_logprobs(plain, PROMPT, rollout.token_ids).tolist()


def test_turns_span_a_weight_push_exactly(tiny_model, weights, engine, agent):
    changed = {name: weight * 0.8 for name, weight in weights.items()}

    class Pushing(Echo):
        async def step(self, turn: str) -> Reply:
            if engine.version == 3:
                engine.load_weights(changed.items(), 4)
            return super().step(turn)

    for seed in range(3):
        engine.load_weights(weights.items(), 3)
        rollout = asyncio.run(agent(Pushing).run(new(seed), engine, Sampling(max_tokens=60)))
        by_version = {
            3: logprobs_of(tiny_model, weights, rollout),
            4: logprobs_of(tiny_model, changed, rollout),
            -1: [0.0] * len(rollout.token_ids),
        }
        expected = [by_version[v][place] for place, v in enumerate(rollout.versions)]
        assert rollout.logprobs == pytest.approx(expected, abs=ROUNDING)
        first = rollout.loss_mask.index(False)
        assert rollout.versions[:first] == [3] * first
        assert set(rollout.versions[first:]) == {-1, 4}
        # The two policies are told apart.
        assert by_version[3][first:] != pytest.approx(by_version[4][first:], abs=1e-2)


def test_cancelled_rollouts_go_on_where_they_were(weights, engine, agent):
    """A cancelled turn is lost, earlier ones are kept, and the end is the same."""
    engine.load_weights(weights.items(), 3)
    sampling = Sampling(max_tokens=60)

    async def interrupted(rollout: Rollout, steps: int) -> int:
        task = asyncio.create_task(agent().run(rollout, engine, sampling))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        kept = len(rollout.token_ids)
        await agent().run(rollout, engine, sampling)
        return kept

    kept, wholes, resumed = [], [], []
    for seed, steps in enumerate((2, 15, 30, 45)):
        whole = asyncio.run(agent().run(new(seed), engine, sampling))
        rollout = new(seed)
        kept.append(asyncio.run(interrupted(rollout, steps)))
        wholes.append(whole)
        resumed.append(rollout)
        if rollout.token_ids == whole.token_ids:
            assert rollout.loss_mask == whole.loss_mask
            assert rollout.environment_reward == whole.environment_reward
        assert rollout.status is RolloutStatus.COMPLETED
    assert same_draws(resumed, wholes)
    assert kept[0] == 0 < kept[-1]


def test_greedy_turns_do_not_depend_on_the_seed(weights, engine, agent):
    engine.load_weights(weights.items(), 3)
    sampling = Sampling(max_tokens=60, temperature=0.0)
    runs = [asyncio.run(agent().run(new(seed), engine, sampling)) for seed in (1, 2, 3)]
    one, other = runs[1:]  # the first fills the cache; of these two all is computed alike
    assert one.token_ids == other.token_ids
    assert sum(one.loss_mask) > 6  # more than one turn


def test_the_reward_of_an_environment_rises(tiny_model, tmp_path, engine):
    module = PolicyModule(
        str(tiny_model),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
        update={"seed": 7},
    )
    data = RLDataModule(
        numbers(10, 30, seed=1),
        [EnvironmentReward()],
        engine=engine,
        agent=MultiTurn(Echo, max_turns=2, max_turn_tokens=3),
        sampling=Sampling(max_tokens=12),
        groups_per_iteration=6,
        group_size=8,
        iterations_per_epoch=10,
        seed=7,
    )
    report = RunReport()
    trainer_of(tmp_path, [WeightSync(), report], logger=False).fit(module, data)
    rewards = [row["reward/environment"] for row in report.history if "reward/mean" in row]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.3
    name = "rollout/logprob_gap_max"
    gaps = [row[name] for row in report.history if name in row]
    assert len(gaps) >= 3  # not where all rewards are alike: nothing is scored then
    assert max(gaps) < 1e-4
