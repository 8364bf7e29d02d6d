"""Environments of the verifiers library (up to 0.1) under MultiTurn, with the real library."""

import asyncio
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version
from transformers import Qwen2Tokenizer

from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.agents.verifiers import VerifiersEnvironment, VerifiersPrompts
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.engine_checks import FakeEngine
from tests.tiny_models import chatml_tokenizer


def installed() -> bool:
    try:
        return Version(version("verifiers")) < Version("0.2")
    except PackageNotFoundError:
        return False


needs_verifiers = pytest.mark.skipif(not installed(), reason="needs verifiers<0.2")

# What an author of an environment writes: a number to guess, three turns, a rubric.
MODULE = '''
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = 0

    async def env_response(self, messages, state, **kwargs):
        guess, answer = int(messages[-1].content), int(state["answer"])
        state["guesses"] += 1
        if guess == answer:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Larger." if answer > guess else "Smaller."}]

def hit(completion, answer, **kwargs):
    return float(any(m.role == "assistant" and m.content == answer for m in completion))

def brief(state, **kwargs):
    return 1.0 / len(state["trajectory"])

def load_environment(largest=9, tools=False):
    rows = [{"question": f"0 to {largest}?", "answer": str(n)} for n in range(largest + 1)]
    rubric = vf.Rubric(funcs=[hit, brief], weights=[1.0, 0.5])
    data = Dataset.from_list(rows)
    if tools:
        def double(x: int) -> int:
            """Twice x."""
            return 2 * x
        return vf.ToolEnv(dataset=data, rubric=rubric, tools=[double])
    return Guess(dataset=data, rubric=rubric, max_turns=3)
'''


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return chatml_tokenizer()


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    name = f"guess_{tmp_path.name}"  # environments are cached by name
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


class Says(FakeEngine):
    """Writes given texts, one per turn."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.turns = [tokenizer(f"{text}<|im_end|>")["input_ids"] for text in texts]

    async def generate(self, token_ids, sampling, seed) -> Completion:
        turn = self.turns.pop(0)
        return Completion(turn, [-1.0] * len(turn), "stop", [0] * len(turn))


def play(prompt: Prompt, tokenizer, *texts: str, **limits) -> Rollout:
    agent = MultiTurn(VerifiersEnvironment, **limits)
    agent.configure(tokenizer)
    rollout = Rollout(prompt, "g", 0, 0, 1.0)
    return asyncio.run(agent.run(rollout, Says(tokenizer, *texts), Sampling(max_tokens=500)))


@needs_verifiers
def test_a_game_is_played_and_graded_by_its_own_rubric(module, tokenizer):
    prompts = VerifiersPrompts(module)
    prompts.load(tokenizer)
    assert len(prompts) == 10
    assert prompts[7].prompt == [{"role": "user", "content": "0 to 9?"}]
    rollout = play(prompts[7], tokenizer, "5", "7")
    assert [(m["role"], m["content"]) for m in rollout.completion] == [
        ("assistant", "5"),
        ("user", "Larger."),
        ("assistant", "7"),
    ]
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    assert rollout.environment_reward == 1.0 + 0.5 / 2


@needs_verifiers
def test_its_own_limit_ends_a_game(module, tokenizer):
    prompts = VerifiersPrompts(module, {"largest": 4})
    prompts.load(tokenizer)
    assert len(prompts) == 5
    rollout = play(prompts[0], tokenizer, "4", "3", "2", "1")
    assert rollout.finish_reason == "stop"
    assert rollout.environment_reward == pytest.approx(0.5 / 3)


@needs_verifiers
def test_a_games_mistake_costs_one_rollout_and_ours_end_without_a_grade(module, tokenizer):
    prompts = VerifiersPrompts(module)
    prompts.load(tokenizer)
    rollout = play(prompts[7], tokenizer, "five")
    assert rollout.status is RolloutStatus.FAILED
    assert "invalid literal for int()" in rollout.error
    rollout = play(prompts[7], tokenizer, "5", "6", max_turns=2)
    assert (rollout.finish_reason, rollout.environment_reward) == ("max_turns", 0.0)


@needs_verifiers
def test_what_it_cannot_run_is_refused(module, tokenizer):
    prompts = VerifiersPrompts(module, {"tools": True})
    prompts.load(tokenizer)
    assert "use ToolAgent" in play(prompts[0], tokenizer, "1").error
    with pytest.raises(ConfigError, match="no_such_module"):
        VerifiersPrompts("no_such_module").load(tokenizer)


@pytest.mark.skipif(installed(), reason="verifiers is installed")
def test_without_the_library_it_says_what_to_install(tokenizer):
    with pytest.raises(ConfigError, match=r"pip install 'verifiers<0\.2'"):
        VerifiersPrompts("wordle").load(tokenizer)
