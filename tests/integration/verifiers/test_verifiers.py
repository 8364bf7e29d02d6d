"""Test VerifiersAgent with the real library (make verifiers), its workers and our endpoint.

Slow: each worker imports verifiers, which takes seven seconds.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from lightning_rl.run.loop.background import run_async
from lightning_rl.verifiers import VerifiersAgent, VerifiersPrompts
from lightning_rl.verifiers.workers import workers_of
from tests.integration.verifiers.games import write_games
from tests.support.engine_checks import FakeEngine, is_running, wait_for
from tests.support.tiny_models import chat_tokenizer

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build" / "verifiers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON / "made").exists(), reason="`make verifiers` makes the environment"
    ),
]
TOKENIZER = chat_tokenizer("qwen2_5")


class Says(FakeEngine):
    """Writes what a function of the prompt and the seed says, and counts how often it was asked."""

    max_length = 4096

    def __init__(self, says: Callable[[str, int], str]) -> None:
        self.says = says
        self.asked = 0

    async def generate(self, token_ids, sampling, seed) -> Completion:
        self.asked += 1
        await asyncio.sleep(0)
        text = self.says(TOKENIZER.decode(token_ids), seed)
        turn = TOKENIZER(f"{text}<|im_end|>")["input_ids"]
        return Completion(turn, [-1.0] * len(turn), "stop", [0] * len(turn))


def in_turn(*texts: str) -> Says:
    left = list(texts)
    return Says(lambda prompt, seed: left.pop(0))


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    return write_games(tmp_path_factory.mktemp("games"))


def settings(games: Path, name: str, **options: Any) -> dict[str, Any]:
    return {
        "environment": name,
        "python": str(PYTHON),
        "options": options,
        "env": {"PYTHONPATH": str(games)},
    }


def configured(games: Path, name: str, max_seconds: float | None = None, **options: Any):
    agent = VerifiersAgent(**settings(games, name, **options), max_seconds=max_seconds)
    agent.configure(TOKENIZER)
    return agent


@pytest.fixture(scope="module")
def guess(games):
    agent = configured(games, "vf_guess", max_seconds=20)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def tasks(games) -> VerifiersPrompts:
    prompts = VerifiersPrompts(**settings(games, "vf_guess"))
    prompts.load(TOKENIZER)
    return prompts


def trapped(prompt: Prompt, trap: str) -> Prompt:
    task = prompt.columns["task"] | {"trap": trap}
    return Prompt(prompt.id, prompt.prompt, prompt.token_ids, {"task": task})


async def play(agent, prompt: Prompt, engine: Says, seed: int = 0) -> Rollout:
    rollout = Rollout(prompt, "g", 0, seed)
    try:
        return await agent.run(rollout, engine, Sampling(max_tokens=50))
    except Exception as error:
        rollout.fail(str(error))
        return rollout


def test_a_game_is_played_and_graded_by_its_own_rewards(guess, tasks):
    assert len(tasks) == 10
    assert tasks[1].prompt == [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "0 to 9?"},
    ]
    rollout = run_async(play(guess, tasks[1], in_turn("5", "x", "1")))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    assert [m["content"] for m in rollout.completion] == ["5", "Smaller.", "x", "Larger.", "1"]
    # hit 1, brief 0.5 * 1/3
    assert rollout.environment_reward == pytest.approx(1 + 0.5 / 3)
    assert rollout.logged == pytest.approx({"hit": 1, "brief": 1 / 3, "length": 3, "turns": 3})
    # One row: each turn goes on from the very tokens of the one before.
    assert len(rollout.rows) == 1
    assert [rollout.token_ids[call.start] for call in rollout.calls] == [
        TOKENIZER(digit)["input_ids"][0] for digit in "5x1"
    ]
    assert sum(rollout.loss_mask) == 6


def test_many_play_at_once_each_with_the_tokens_of_its_own(guess, tasks):
    engine = Says(lambda prompt, seed: str(seed % 10))

    async def all_of_them() -> list[Rollout]:
        return await asyncio.gather(
            *(play(guess, tasks[n % 10], engine, seed=n) for n in range(100))
        )

    for number, rollout in enumerate(run_async(all_of_them())):
        assert rollout.completed, rollout.error
        # The first guess is the rollout's own seed, which is its task's number: a hit in one turn.
        assert rollout.completion == [{"role": "assistant", "content": str(number % 10)}]
        assert rollout.environment_reward == 1.5
    assert engine.asked == 100


def test_what_an_environment_raises_costs_its_rollout_and_its_hang_the_time_limit(guess, tasks):
    rollout = run_async(play(guess, trapped(tasks[3], "raises"), in_turn("5")))
    assert rollout.status is RolloutStatus.FAILED
    assert "the board is gone" in rollout.error
    assert len(rollout.token_ids) == 2  # what the model wrote until then
    guess.max_seconds, limit = 5, guess.max_seconds  # the first turn has to fit in
    try:
        rollout = run_async(play(guess, trapped(tasks[3], "hangs"), in_turn("5")))
    finally:
        guess.max_seconds = limit
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "max_seconds")
    assert rollout.environment_reward == 0.0
    assert run_async(play(guess, tasks[3], in_turn("3"))).environment_reward == 1.5


def test_a_dead_workers_rollouts_are_played_again_with_what_was_generated(guess, tasks, tmp_path):
    engine = Says(lambda prompt, seed: "5")
    fatal = str(tmp_path / "dies-always")
    once = str(tmp_path / "dies-once")

    async def together() -> list[Rollout]:
        return await asyncio.gather(
            play(guess, trapped(tasks[5], once), engine, 1),
            play(guess, trapped(tasks[5], fatal), engine, 2),
            play(guess, tasks[5], engine, 3),
        )

    first, second, third = run_async(together())
    assert first.environment_reward == third.environment_reward == 1.5
    assert second.status is RolloutStatus.FAILED
    assert "killed its worker twice: the worker was killed by SIGKILL: struck down" in second.error
    assert engine.asked == 3  # none twice: the second time it was given again


def test_seats_are_roles_and_what_others_wrote_has_no_loss(games):
    prompts = VerifiersPrompts(**settings(games, "vf_duel"))
    prompts.load(TOKENIZER)
    agent = configured(games, "vf_duel")
    rollout = run_async(play(agent, prompts[0], in_turn("abc", "de")))
    agent.close()
    assert rollout.completed, rollout.error
    assert rollout.role_rewards == {"proposer": 1.0, "judge": 0.25}
    assert rollout.environment_reward == 1.0  # of those that learn
    assert [(row.role, sum(row.loss_mask)) for row in rollout.rows if row.token_ids] == [
        ("proposer", 4),
        ("judge", 0),
    ]


def test_the_environments_tools_are_called_in_the_models_own_tokens(games):
    prompts = VerifiersPrompts(**settings(games, "vf_lookup"))
    prompts.load(TOKENIZER)
    call = '<tool_call>\n{"name": "shop_price", "arguments": {"fruit": "pear"}}\n</tool_call>'
    agent = configured(games, "vf_lookup")
    rollout = run_async(play(agent, prompts[0], in_turn(call, "4 coins")))
    agent.close()
    assert rollout.completed, rollout.error
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[1]["content"] == "4 coins"
    assert rollout.environment_reward == 1.0
    row = rollout.rows[rollout.calls[0].row]
    wrote = [TOKENIZER.decode(row.token_ids[made.start : made.stop]) for made in rollout.calls]
    assert wrote == [f"{call}<|im_end|>", "4 coins<|im_end|>"]


def test_options_reach_the_environment(games):
    options = {"taskset": {"largest": 4}, "agent": {"max_turns": 1}}
    prompts = VerifiersPrompts(**settings(games, "vf_guess", **options), skip=1, limit=2)
    prompts.load(TOKENIZER)
    assert [prompts[n].columns["task"]["answer"] for n in range(2)] == [1, 2]
    agent = configured(games, "vf_guess", **options)
    rollout = run_async(play(agent, prompts[0], in_turn("3")))
    assert rollout.logged["turns"] == 1
    assert rollout.environment_reward == 0.5
    [worker] = workers_of(agent.hosting)._workers
    pid = worker._process.pid
    agent.close()
    wait_for(lambda: not is_running(pid))


def test_what_cannot_be_hosted_is_refused(games):
    with pytest.raises(ConfigError, match=r"taskset 'no_such_game' not found"):
        VerifiersPrompts(**settings(games, "no_such_game")).load(TOKENIZER)
    endless = settings(games, "vf_guess", taskset={"endless": True})
    with pytest.raises(DataError, match="this taskset never ends; set limit"):
        VerifiersPrompts(**endless).load(TOKENIZER)
    with pytest.raises(ConfigError, match="larges"):
        VerifiersPrompts(**settings(games, "vf_guess", taskset={"larges": 3})).load(TOKENIZER)
