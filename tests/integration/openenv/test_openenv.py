"""Test OpenEnvAgent with the real package (make openenv), in servers that it starts.

Slow: each server imports OpenEnv, which takes three seconds of CPU.
"""

import asyncio
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.openenv import OpenEnvAgent, OpenEnvPrompts, OpenEnvServer
from lightning_rl.openenv.running import running
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from lightning_rl.run.loop.background import run_async
from tests.integration.openenv.games import write_games
from tests.support.agents import Scripted
from tests.support.engine_checks import FakeEngine, is_running, wait_for
from tests.support.tiny_models import chat_tokenizer

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build" / "openenv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON / "made").exists(), reason="`make openenv` makes the environment"
    ),
]
TOKENIZER = chat_tokenizer("qwen2_5")
NUMBERS = [random.Random(seed).randrange(10) for seed in range(40)]


def in_turn(*texts: str) -> Scripted:
    return Scripted([TOKENIZER(f"{text}<|im_end|>")["input_ids"] for text in texts], 4096)


class Counts(FakeEngine):
    """Guesses 0, 1, 2, ... in each game: as many as it was answered before."""

    max_length = 4096

    async def generate(self, token_ids, sampling, seed) -> Completion:
        guess = TOKENIZER.decode(token_ids).count("Larger.")
        turn = TOKENIZER(f"{guess}<|im_end|>")["input_ids"]
        return Completion(turn, [-1.0] * len(turn), "stop", [0] * len(turn))


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> Path:
    return write_games(tmp_path_factory.mktemp("games"))


def served(games: Path, environment: str = "oe_guess:Guess", **changes: Any) -> OpenEnvServer:
    options = {"environment": environment, "python": str(PYTHON), "observation_field": "told"}
    return OpenEnvServer(**options | {"env": {"PYTHONPATH": str(games)}} | changes)


def configured(server: OpenEnvServer, **limits: Any) -> OpenEnvAgent:
    agent = OpenEnvAgent(server, **limits)
    agent.configure(TOKENIZER)
    return agent


def tasks_of(server: OpenEnvServer, **options: Any) -> OpenEnvPrompts:
    prompts = OpenEnvPrompts(server, chat=True, **options)
    prompts.load(TOKENIZER)
    return prompts


@pytest.fixture(scope="module")
def server(games):
    return served(games, reward_fields=["tries", "cost"])


@pytest.fixture(scope="module")
def guess(server):
    agent = configured(server, max_turns=10)
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def tasks(server) -> OpenEnvPrompts:
    return tasks_of(server, seeds=40)


def trapped(prompt: Prompt, trap: str, marks: Path | None = None) -> Prompt:
    reset = prompt.columns["reset"] | {"trap": trap, "marks": str(marks or "")}
    return Prompt(prompt.id, prompt.prompt, prompt.token_ids, prompt.columns | {"reset": reset})


async def play(agent, prompt: Prompt, engine: FakeEngine, max_tokens: int = 2000) -> Rollout:
    return await agent.run(Rollout(prompt, "g", 0, 0), engine, Sampling(max_tokens=max_tokens))


def told(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.completion]


def test_a_game_is_played_and_paid_by_its_environment(guess, tasks):
    assert len(tasks) == 40
    assert tasks[0].prompt == [{"role": "user", "content": "0 to 9?"}]
    assert NUMBERS[0] == 6
    rollout = run_async(play(guess, tasks[0], in_turn("5", "7", "six", "6")))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    refused = "Error: guess: Input should be a valid integer, unable to parse string as an integer"
    assert told(rollout) == ["5", "Larger.", "7", "Smaller.", "six", refused, "6", "Yes."]
    assert rollout.environment_reward == 1 - 3 * 0.25
    assert [call.reward for call in rollout.calls] == [-0.25, -0.25, 0.0, 0.75]
    # Tries 1, 2 and 3, summed over the steps; what was refused is no step.
    parts = {"tries": 6.0, "cost": -0.75}
    assert rollout.logged == rollout.extra == parts
    assert len(rollout.rows) == 1


def test_rows_of_another_source_need_only_the_arguments_of_reset(guess, tasks):
    prompt = Prompt("0", "Guess.", tasks[0].token_ids, {"reset": {"seed": 0}})
    assert run_async(play(guess, prompt, in_turn("6"))).environment_reward == 0.75
    with pytest.raises(ConfigError, match="or of rows with a column `reset`"):
        run_async(play(guess, Prompt("0", "Guess.", [1], {"reset": 3}), in_turn("6")))


def test_many_play_at_once_each_in_a_session_of_its_own(guess, tasks):
    async def all_of_them() -> list[Rollout]:
        return await asyncio.gather(*(play(guess, tasks[n], Counts()) for n in range(40)))

    for number, rollout in zip(NUMBERS, run_async(all_of_them()), strict=True):
        assert rollout.completed, rollout.error
        assert told(rollout)[::2] == [str(guess) for guess in range(number + 1)]


def test_an_episode_without_end_ends_at_the_limits(guess, tasks, server):
    rollout = run_async(play(guess, tasks[0], in_turn(*["5"] * 10)))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "max_turns")
    assert rollout.environment_reward == -2.5
    hurried = configured(server, max_seconds=3.0)
    rollout = run_async(play(hurried, trapped(tasks[0], "hangs"), in_turn("5", "7")))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "max_seconds")
    assert rollout.environment_reward in (-0.25, 0.0)  # the first turn may not fit in


@pytest.mark.parametrize("trap", ["raises", "dies"])
def test_what_goes_wrong_once_is_asked_again(guess, tasks, trap, tmp_path):
    rollout = run_async(play(guess, trapped(tasks[0], trap, tmp_path / "x"), in_turn("5", "6")))
    assert rollout.completed, rollout.error
    assert told(rollout) == ["5", "Larger.", "6", "Yes."]
    assert rollout.environment_reward == 0.5
    assert (tmp_path / "x").read_text() == "xx"


def test_what_goes_wrong_again_costs_its_rollout_alone(guess, tasks):
    async def all_of_them() -> list[Rollout]:
        traps = ["dies", "", "raises", "", "", ""]
        played = (trapped(tasks[0], trap) for trap in traps)
        return await asyncio.gather(*(play(guess, each, Counts()) for each in played))

    rollouts = run_async(all_of_them())
    assert [rollout.completed for rollout in rollouts] == [False, True, False, True, True, True]
    killer, raiser = rollouts[0].error, rollouts[2].error
    for part in ("it was killed by SIGKILL", "struck down", "(twice; at first: "):
        assert part in killer
    assert "raised: the board is gone (twice" in raiser
    assert rollouts[2].status is RolloutStatus.FAILED
    assert {rollout.environment_reward for rollout in rollouts if rollout.completed} == {1 - 7 / 4}


def test_a_server_that_hangs_is_not_waited_for(games, tasks):
    agent = configured(served(games, answer_seconds=1.0))
    try:
        rollout = run_async(play(agent, trapped(tasks[0], "hangs"), in_turn("5", "6")))
    finally:
        agent.close()
    assert rollout.status is RolloutStatus.FAILED
    assert "gave no answer within 1 s (twice" in rollout.error


def test_an_environment_that_does_not_depend_on_its_seed_is_told(guess, server, tasks):
    drifts = trapped(tasks[0], "drifts")
    rollout = run_async(play(guess, drifts, in_turn("5")))
    assert rollout.status is RolloutStatus.FAILED
    assert "but with '0 to 9?' when the prompts were loaded" in rollout.error
    for trap, why in (
        ("no reset", "raised: no board"),
        ("no text", "told: Input should be a valid string"),
        ("over", "ends at once"),
    ):
        with pytest.raises(DataError, match=rf"reset with .*'seed': 0.* .*{why}"):
            tasks_of(server, tasks=[{"trap": trap}])


def test_status_500_is_asked_again_and_places_are_waited_for(games):
    rude = served(games, "oe_guess:rude", sessions=2)
    tasks, agent = tasks_of(rude, seeds=8), configured(rude, max_turns=10)

    async def all_of_them() -> list[Rollout]:
        return await asyncio.gather(*(play(agent, tasks[n], Counts()) for n in range(8)))

    try:
        for number, rollout in zip(NUMBERS, run_async(all_of_them()), strict=False):
            assert rollout.completed, rollout.error
            assert len(rollout.calls) == number + 1
    finally:
        agent.close()


def test_an_interrupted_rollout_goes_on_in_a_new_session(guess, tasks):
    rollout = Rollout(tasks[0], "g", 0, 0)

    class Aborts(Scripted):
        async def generate(self, token_ids, sampling, seed):
            if not self.turns:
                return Completion([], [], "abort", [])
            return await super().generate(token_ids, sampling, seed)

    turns = in_turn("5", "7").turns
    run_async(guess.run(rollout, Aborts(turns, 4096), Sampling(max_tokens=400)))
    assert rollout.status is RolloutStatus.ABORTED
    run_async(guess.run(rollout, in_turn("6"), Sampling(max_tokens=400)))
    assert rollout.completed, rollout.error
    assert told(rollout) == ["5", "Larger.", "7", "Smaller.", "6", "Yes."]
    assert rollout.environment_reward == 0.25


CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"fruit": "{}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def shop(games):
    agent = configured(served(games, "oe_shop:Shop", observation_field=None))
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def errands(shop) -> OpenEnvPrompts:
    prompts = OpenEnvPrompts(
        shop.server, template="Shop with {{ reset.seed }} coins.", chat=True, first_seed=10
    )
    prompts.load(TOKENIZER, shop.chat_options)
    return prompts


def test_tools_of_an_environment_are_called_and_pay_and_end_the_episode(shop, errands):
    assert "What some fruit costs." in TOKENIZER.decode(errands[0].token_ids)
    both = CALL.format("price", "pear") + "\n" + CALL.format("price", "fig")
    rollout = run_async(play(shop, errands[0], in_turn(both, CALL.format("order", "pear"))))
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    said = [m["content"] for m in rollout.completion if m["role"] == "tool"]
    # Coins are the seed: 4 + 10. Both calls were made, in their order.
    assert (said[0], said[2]) == ("14", "Bought after 2.")
    assert "fig" in said[1]
    assert rollout.completion[2]["error"] == "exception"
    assert rollout.environment_reward == 1 - 2 * 0.125
    assert [call.reward for call in rollout.calls] == [-0.25, 1.0]


def test_calls_of_an_interrupted_rollout_are_made_again(shop, errands):
    rollout = Rollout(errands[0], "g", 0, 0)
    first = CALL.format("price", "pear")

    class Aborts(Scripted):
        async def generate(self, token_ids, sampling, seed):
            if not self.turns:
                return Completion([], [], "abort", [])
            return await super().generate(token_ids, sampling, seed)

    long = Sampling(max_tokens=2000)
    run_async(shop.run(rollout, Aborts(in_turn(first).turns, 4096), long))
    assert rollout.status is RolloutStatus.ABORTED
    run_async(shop.run(rollout, in_turn(CALL.format("order", "pear")), long))
    assert rollout.completed, rollout.error
    # The environment counted the call that it was told again.
    assert rollout.completion[-1]["content"] == "Bought after 1."
    assert [call.reward for call in rollout.calls] == [-0.125, 1.0]


def test_the_template_of_the_package_is_played_by_a_command(tmp_path):
    made = [str(PYTHON / "bin/openenv"), "init", "parrot", "--output-dir", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True, env={**os.environ, "CI": "true"})
    command = [str(PYTHON / "bin/uvicorn"), "parrot.server.app:app", "--port", "{port}"]
    command += ["--ws-ping-interval", "0.5", "--ws-ping-timeout", "0.5"]
    parrot = OpenEnvServer(
        command=command,
        env={"PYTHONPATH": str(tmp_path)},
        observation_field="echoed_message",
        sessions=1,  # as the template's app has it
    )
    tasks, agent = tasks_of(parrot, seeds=3), configured(parrot, max_turns=2)

    class Slow(Scripted):
        """Writes for so long that the server would give up an answer to its pings."""

        async def generate(self, token_ids, sampling, seed):
            await asyncio.sleep(1.5)
            return await super().generate(token_ids, sampling, seed)

    async def both() -> list[Rollout]:
        engines = (Slow(in_turn("Hello", "you").turns, 4096) for _ in range(2))
        return await asyncio.gather(*(play(agent, tasks[0], engine) for engine in engines))

    try:
        for rollout in run_async(both()):
            assert rollout.finish_reason == "max_turns", rollout.error
            assert told(rollout) == ["Hello", "Hello", "you", "you"]
            assert rollout.environment_reward == pytest.approx(0.1 * 5 + 0.1 * 3)
        address = f"http://127.0.0.1:{running(parrot)._port}"
        greedy = OpenEnvServer(address, observation_field="echoed_message", sessions=2)
        agent.server = greedy
        full = sorted(run_async(both()), key=lambda rollout: rollout.completed)
        for part in ("has no place: ", "lower sessions=2, or raise max_concurrent_envs"):
            assert part in full[0].error
        assert full[1].completed, full[1].error
    finally:
        agent.server = parrot
        agent.close()


@pytest.mark.parametrize("kind", "abcdef")
def test_what_is_no_observation_is_told(games, kind, junk):
    with pytest.raises(DataError, match="sent a malformed observation: "):
        tasks_of(junk, tasks=[{"kind": kind}])


@pytest.fixture(scope="module")
def junk(games):
    server = served(games, "oe_junk:app")
    yield server
    OpenEnvAgent(server).close()


def test_a_run_does_not_begin_without_its_server(games):
    nowhere = OpenEnvServer(address="http://127.0.0.1:9", answer_seconds=5)
    for begin in (configured, tasks_of):
        with pytest.raises(
            ConfigError, match=r"127\.0\.0\.1:9.*; start it, or correct its address"
        ):
            begin(nowhere)
    with pytest.raises(ConfigError, match=r"did not start; it ended with .* 1.*no_such"):
        configured(served(games, "no_such:Game"))
    with pytest.raises(ConfigError, match=r"SUPPORTS_CONCURRENT_SESSIONS is False: set sessions"):
        configured(served(games, "oe_guess:Alone"))
    with pytest.raises(ConfigError, match=r"did not answer within start_seconds=0\.1"):
        configured(served(games, sessions=5, start_seconds=0.1))
    bare = served(games, "oe_shop:Bare")
    with pytest.raises(ConfigError, match="takes calls of tools as actions, but lists none"):
        configured(bare)
    OpenEnvAgent(bare).close()
    choose = served(games, "oe_junk:app", action_field="texts")
    with pytest.raises(ConfigError, match=r"action_field='texts' must .*; its actions have text"):
        configured(choose)
    OpenEnvAgent(choose).close()


def test_a_server_ends_with_its_agent(games):
    agent = configured(served(games, sessions=3))
    pid = running(agent.server)._child.pid
    assert is_running(pid)
    agent.close()
    wait_for(lambda: not is_running(pid))
