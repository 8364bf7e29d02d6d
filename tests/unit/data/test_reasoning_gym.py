"""Test reasoning-gym tasks as prompts, and their verifiers as a reward."""

import pytest

from lightning_rl.data.sources import ReasoningGymPrompts, reasoning_gym_score
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import load_tokenizer


def drawn(tiny_model, **options):
    prompts = ReasoningGymPrompts("chain_sum", size=3, shuffle=False, **options)
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    prompts.load(tokenizer)
    return prompts.draw(3)


def test_questions_become_chats_with_their_entry(tiny_model):
    prompts = drawn(tiny_model, system="Be brief.")
    for prompt in prompts:
        system, user = prompt.prompt
        assert system == {"role": "system", "content": "Be brief."}
        assert user == {"role": "user", "content": prompt.columns["entry"]["question"]}
        assert prompt.columns["task"] == "chain_sum"


def test_the_task_seed_decides_the_questions(tiny_model):
    first, again, other = (drawn(tiny_model, task_seed=s, chat=False) for s in (1, 1, 2))
    assert [p.prompt for p in first] == [p.prompt for p in again]
    assert [p.prompt for p in first] != [p.prompt for p in other]
    assert isinstance(first[0].prompt, str)


def test_the_score_is_the_tasks_own(tiny_model):
    entry = drawn(tiny_model)[0].columns["entry"]
    answer = entry["answer"]
    completions = [
        f"<answer>0</answer> no: <answer>{answer}</answer>",
        f" {answer}\n",
        [{"role": "assistant", "content": f"<answer>{answer}</answer>"}],
        f"<answer>{answer}1</answer>",
    ]
    scores = reasoning_gym_score(completions, [entry] * 4, ["chain_sum"] * 4)
    assert scores[:3] == [1.0, 1.0, 1.0]
    assert scores[3] < 1.0
    thoughts = [f"It is {answer}", f"0?</think>{answer}"]
    row = {"entry": [entry] * 2, "task": ["chain_sum"] * 2}
    assert reasoning_gym_score(thoughts, opened_thoughts=[True, True], **row) == [0.0, 1.0]


def test_an_unknown_task_or_option_is_named(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    with pytest.raises(ConfigError, match="task='chain_sun'"):
        ReasoningGymPrompts("chain_sun").load(tokenizer)
    with pytest.raises(ConfigError, match=r"task='chain_sum' \{'terms': 2\}"):
        ReasoningGymPrompts("chain_sum", config={"terms": 2}).load(tokenizer)
