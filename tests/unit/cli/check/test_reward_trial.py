"""Test what check --rewards finds of rewards with a known fault each, and of sound ones."""

import re
from itertools import count

import pytest

from lightning_rl import IterablePrompts, Sampling
from lightning_rl.agents.base import SingleTurn
from lightning_rl.cli.check.reward_trial import RIGHT_FORMS, ROWS, RewardTrial, try_rewards
from lightning_rl.collect.tasks import Task
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.judge_models import OpenAIJudge
from lightning_rl.rewards.ranking import RankingJudge
from lightning_rl.rollout import as_text
from recipes.sort_digits.prepare import make_tokenizer

NUMBER = re.compile(r"\d+")
CHATS = [
    {"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)}
    for n in range(10, 40)
]
ROWS_OF_TEXT = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 40)]


def trial(*functions, rows=ROWS_OF_TEXT, **sampling) -> RewardTrial:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = IterablePrompts(rows)
    prompts.load(tokenizer)
    settings = Sampling(**{"max_tokens": 8} | sampling)
    task = Task("", prompts, SingleTurn(), Rewards(functions), settings, 4, 1.0)
    return RewardTrial(task, tokenizer)


def last_number(completions, answer):
    texts = map(as_text, completions)
    return [
        float(NUMBER.findall(f"none 0 {text}")[-1] == a)
        for text, a in zip(texts, answer, strict=True)
    ]


def exact(completions, answer):
    return [float(text == a) for text, a in zip(completions, answer, strict=True)]


def contains(completions, answer):
    return [float(a in text) for text, a in zip(completions, answer, strict=True)]


def raises_on_no_number(completions, answer):
    return [
        float(NUMBER.findall(text)[-1] == a) for text, a in zip(completions, answer, strict=True)
    ]


def of_a_string(completions, answer):
    return [float(text == answer) for text in completions]  # a list, never equal to a text


def fewest_numbers(completions, **rest):
    return [1.0 / (1 + len(NUMBER.findall(text))) for text in completions]


def first_of_group(completions, answer):
    found = last_number(completions, answer)
    return [score + 0.5 * (place == 0) for place, score in enumerate(found)]


def ever_more():
    calls = count()

    def reward(completions, answer):
        return [score + 1e-3 * next(calls) for score in last_number(completions, answer)]

    return reward


@pytest.mark.parametrize("rows", [ROWS_OF_TEXT, CHATS])
def test_a_sound_reward_has_no_fault_and_its_table_is_as_by_hand(rows):
    verdict = trial(last_number, rows=rows).run(per_iteration=8)
    assert verdict.faults == []
    head, *table = verdict.lines
    assert head == f"rewards, tried on {ROWS} rows, whose answers are in the column 'answer':"
    paid = {line[2:28].strip(): (float(line[28:36]), line[36:].split()[0]) for line in table}
    for form in RIGHT_FORMS:
        assert paid[f"the answer {form}"] == (1.0, "6")
    for wrong in ("another row's answer", "cut off in its middle", "nothing", "a megabyte"):
        assert paid[wrong] == (0.0, "0")
    [note] = verdict.notes
    assert "an iteration's 8 completions" in note


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (contains, "'every answer in turn' earns as much as the right answer"),
        (raises_on_no_number, "it cannot grade 'nothing': reward raises_on_no_number: IndexError"),
        (of_a_string, "earns no more than a wrong one, however it is written, in 6 of 6 rows"),
        (first_of_group, "differ with the order of a group"),
        (ever_more(), "differ when the same text is graded again"),
    ],
)
def test_a_fault_is_found(reward, fault):
    faults = trial(reward).run(8).faults
    assert any(fault in found for found in faults), faults


def test_forms_that_are_not_paid_are_noted_not_refused():
    verdict = trial(exact).run(8)
    assert verdict.faults == []
    assert verdict.notes[0].startswith("the right answer is not paid in full in a sentence, in ")


def test_rows_of_another_type_are_tried_too_and_their_answers_named():
    """The last of thirty rows has a number in place of a text, with which nothing is equal."""
    rows = [*ROWS_OF_TEXT[:-1], {"prompt": "39+39=", "answer": 78}]
    [fault] = trial(last_number, rows=rows).run(8).faults
    assert "in 1 of 7 rows, first 78 (int, row " in fault


def of_anything(completions, **columns):
    return [float(len(text)) for text in completions]


def of_code(completions, tests):
    return [float(text.startswith("def ")) for text in completions]


@pytest.mark.parametrize(
    ("reward", "rows"),
    [
        (of_anything, ROWS_OF_TEXT),
        (of_code, [{"prompt": f"{n}", "tests": f"assert f() == {n}"} for n in range(10, 40)]),
    ],
)
def test_what_may_be_no_answer_is_no_fault(reward, rows):
    verdict = trial(reward, rows=rows).run(8)
    assert verdict.faults == []
    assert any("holds no answers" in note for note in verdict.notes)
    beyond = [note for note in verdict.notes if "it cannot grade 'a megabyte'" in note]
    assert len(beyond) == (reward is of_anything)


def test_a_reward_without_answers_is_tried_on_what_is_left():
    verdict = trial(fewest_numbers, rows=[{"prompt": "12="}, {"prompt": "34="}]).run(8)
    assert verdict.faults == []
    assert "no column that a reward takes by name holds an answer" in verdict.lines[0]
    assert [line[2:28].strip() for line in verdict.lines[1:]] == [
        "nothing",
        "the prompt repeated",
        "a megabyte",
        "half a character",
    ]


@pytest.mark.parametrize("sampling", [{"stop": ["2", "4", "6", "."]}, {"max_tokens": 1}])
def test_a_right_answer_is_graded_as_far_as_an_engine_would_write_it(sampling):
    """All answers are even numbers of two digits, of which the first digits remain."""
    verdict = trial(
        last_number, rows=[r for r in ROWS_OF_TEXT if r["answer"][0] in "246"], **sampling
    ).run(8)
    [fault] = verdict.faults
    assert "earns no more than a wrong one" in fault
    [(name, value)] = sampling.items()
    assert f"in 6 of them sampling.stop={[] if name != 'stop' else value}" in fault
    assert f"sampling.max_tokens={value if name == 'max_tokens' else 8} ends it early" in fault


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda environment_rewards: environment_rewards, "an environment pays"),
        (
            RankingJudge(OpenAIJudge("http://127.0.0.1:9/v1", "judge")),
            "ranking compares the completions of a group",
        ),
    ],
)
def test_what_texts_alone_cannot_show_is_not_tried(reward, reason):
    class Data:
        groups_per_iteration = 2
        train_tasks = (trial(reward)._task,)

    [verdict] = try_rewards(Data(), make_tokenizer())
    assert not verdict.faults
    [line] = verdict.printed()
    assert f"not tried: {reason}" in line
