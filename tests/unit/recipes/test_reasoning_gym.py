"""The recipe's questions and rationales: who sees what, and whether the verifier agrees."""

import re

import pytest
import reasoning_gym

from lightning_rl.config.layers import load_yaml
from lightning_rl.data.sources import reasoning_gym_score
from recipes.reasoning_gym import prepare
from recipes.reasoning_gym.rationales import RATIONALES

STEP = re.compile(r"(-?\d+) ([-+/]) (-?\d+) = (-?\d+)")
CALCULATED = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a / b,
}


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(prepare, "DRAWN", 150)
    monkeypatch.setattr(prepare, "DRAWN_FOR_RL", 450)
    monkeypatch.setattr(prepare, "NUM_HELDOUT", 20)


@pytest.mark.parametrize("task", prepare.TASKS)
def test_no_question_is_in_two_sets_where_there_are_enough(task, monkeypatch):
    monkeypatch.setattr(prepare, "FEWEST_FOR_RL", 40)
    heldout, warm, train = ([e["question"] for e in part] for part in prepare.draw_questions(task))
    assert len(heldout) == 20
    assert warm
    # Short tasks repeat questions, so a seed far away would not have kept them apart.
    assert len({*heldout, *warm}) == len(heldout) + len(warm)
    assert not {*heldout} & {*train}
    assert len(train) >= 40
    assert not {*warm} & {*train}


def test_a_task_with_too_few_questions_asks_those_of_the_warm_start():
    _, warm, train = prepare.draw_questions("count_bits")
    assert train == warm


@pytest.mark.parametrize("task", prepare.TASKS)
def test_the_verifier_agrees_with_every_rationale(task):
    entries = prepare.draw_questions(task)[1]
    completions = [prepare.work_out(task, entry) for entry in entries]
    scores = reasoning_gym_score(completions, entry=entries, task=[task] * len(entries))
    assert scores == [1.0] * len(entries)


@pytest.mark.parametrize(
    "task", ["chain_sum", "leg_counting", "fraction_simplification", "simple_equations"]
)
def test_every_step_of_a_calculation_is_right(task):
    rationales = [RATIONALES[task](entry) for entry in prepare.draw_questions(task)[1]]
    steps = [step for rationale in rationales for step in STEP.findall(rationale)]
    assert len(steps) > 50
    for first, sign, second, result in steps:
        assert CALCULATED[sign](int(first), int(second)) == int(result)


def test_a_rationale_reads_as_its_docstring_says():
    def entry(task, **metadata):
        return RATIONALES[task]({"metadata": metadata})

    assert entry("chain_sum", expression="15 - 43 - 75") == "15 - 43 = -28, -28 - 75 = -103"
    assert (
        entry("leg_counting", animals={"ant": 5, "bird": 2})
        == "5 ants have 30 legs, 2 birds have 4 legs, 30 + 4 = 34"
    )
    assert entry("letter_counting", target_letter="e", span=["The", "sea"]) == "t h e, s e a: e e"
    assert entry("letter_counting", target_letter="x", span=["sea"]) == "s e a: none"
    assert entry("spell_backward", word="tone") == "t o n e, e n o t"
    assert entry("gcd", numbers=[20, 26]) == "26 by 20 leaves 6, 20 by 6 leaves 2, 6 by 2 leaves 0"
    assert entry("count_bits", number=13) == "13 odd, 6, 3 odd, 1 odd"
    assert (
        entry("fraction_simplification", numerator=6, denominator=20)
        == "2 divides both, 6 / 2 = 3, 20 / 2 = 10"
    )
    assert (
        entry("simple_equations", variable="e", equation="5 - 8*e = -51")
        == "-8*e = -51 - 5 = -56, e = -56 / -8 = 7"
    )


def test_a_tag_is_one_token_and_digits_stay_alone():
    text = f"12 cows have 48 legs{prepare.OPEN}48{prepare.CLOSE}"
    tokenizer = prepare.train_tokenizer([text] * 50)
    pieces = tokenizer.tokenize(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert pieces[-4:] == [prepare.OPEN, "4", "8", prepare.CLOSE]
    assert "\u0120legs" in pieces  # learnt; U+0120 stands for a space
    assert len(tokenizer) <= prepare.VOCABULARY_SIZE


def test_the_mixtures_hold_every_task():
    given = load_yaml("recipes/reasoning_gym/grpo.yaml")[0]["data"]["init_args"]
    for prompts, folder in (("train_prompts", "train"), ("eval_prompts", "heldout")):
        sets = {one["name"]: one["prompts"] for one in given[prompts]["init_args"]["sets"]}
        assert list(sets) == list(prepare.TASKS)
        for task, rows in sets.items():
            assert rows["init_args"]["path"] == f"runs/reasoning_gym/{folder}/{task}.jsonl"


def test_all_tasks_are_tasks_of_reasoning_gym_with_a_rationale():
    assert list(prepare.TASKS) == list(RATIONALES)
    assert all(reasoning_gym.get_score_answer_fn(task) for task in prepare.TASKS)
