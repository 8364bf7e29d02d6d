"""Test MathVerify: what counts as the right answer, and texts that would stop a lesser judge."""

import pickle
from pathlib import Path

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards import math_answers
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.math_answers import REASONS, Compare, MathVerify, judged, marked_answer
from lightning_rl.rollout import answer_in
from recipes.math.data import problems, short_answer

pytest.importorskip("math_verify")

HANDMADE = {
    "right": [
        ("42", "6 times 7 is \\boxed{42}."),
        ("42", "<answer> 42 </answer>"),
        ("42", "Thus 40 and then\n#### 42"),
        ("42", "so she has 42"),
        ("1/2", "\\boxed{\\frac{1}{2}}"),
        ("0.5", "\\boxed{\\frac{3}{6}}"),
        ("\\frac{1}{2}", "<answer>0.5</answer>"),
        ("1234", "\\boxed{1,234}"),
        ("1,234", "<answer>1234</answer>"),
        ("1234567", "#### 1,234,567"),
        ("42", "\\boxed{41}, no: \\boxed{42}"),
        ("42", "\\boxed{42 \\text{ apples}}"),
        ("42", "<answer>42 dollars</answer>"),
        ("42", "<answer>$42.</answer>"),
        ("42", "<answer>**42**</answer>"),
        ("42", "\\boxed{42.00}"),
        ("42", "\\boxed{x = 42}"),
        ("42", "\\boxed{6 \\cdot 7}"),
        ("-3", "\\boxed{-3}"),
        ("x + 1", "\\boxed{1 + x}"),
        ("3", "\\boxed{\\sqrt{9}}"),
        ("42", "<think>41? \\boxed{41}</think>\n\\boxed{42}"),
        ("Step by step.\n#### 42", "\\boxed{42}"),
    ],
    "wrong": [
        ("42", "\\boxed{41}"),
        ("42", "\\boxed{42} or rather \\boxed{41}"),
        ("42", "42 <answer>24</answer> 42"),
        ("42", "<answer>40 or 42</answer>"),
        ("42", "\\boxed{40, 41, 42}"),
        ("42", "\\boxed{4.2}"),
        ("42", "\\boxed{-42}"),
        ("1/2", "\\boxed{1/3}"),
        ("42", "<think>\\boxed{42}</think> It is 41."),
    ],
    "no_answer": [("42", ""), ("42", "   "), ("42", "I do not know."), ("42", "\0\ud800 �")],
    "unreadable": [
        ("42", "\\boxed{}"),
        ("42", "<answer></answer>"),
        ("42", "\\boxed{\\frac{}{}}"),
    ],
    "unfinished_thought": [("42", "<think> 6 times 7 is \\boxed{42}")],
}


@pytest.mark.parametrize(
    ("reason", "answer", "text"),
    [(reason, *case) for reason, cases in HANDMADE.items() for case in cases],
)
def test_answers_by_hand(reason, answer, text):
    assert judged(answer_in(text), answer)[0] == reason


def test_a_thought_that_the_template_opened_must_end_before_the_answer_counts():
    texts = ["So \\boxed{42}", "So \\boxed{41}</think>\\boxed{42}", "\\boxed{42}</think> It is 41."]
    log = RewardLog(3)
    scores = Compare("answer")(
        texts, opened_thoughts=[True] * 3, answer=["42"] * 3, **log.arguments()
    )
    assert scores == [0.0, 1.0, 0.0]
    assert log.extra == {
        "math": ["unfinished_thought", "right", "wrong"],
        "answer": [None, "42", "41"],
    }


def test_the_last_mark_counts_and_braces_are_balanced():
    assert marked_answer("\\boxed{\\frac{1}{2}} so \\boxed{\\{1, {2}\\}} .") == "\\{1, {2}\\}"
    assert marked_answer("<answer>1</answer> \\boxed{2") == "1"  # the second was cut off
    assert marked_answer("<answer>\\boxed{7}</answer>") == "7"
    assert marked_answer("no mark: 5") is None


def test_a_gsm8k_row_is_its_own_answer():
    for row in problems(20, seed=3):
        short = short_answer(row)["answer"]
        assert short.isdigit()
        assert judged(f"\\boxed{{{int(short):,}}}", row["answer"])[0] == "right"
        assert judged(f"\\boxed{{{int(short) + 1}}}", row["answer"])[0] == "wrong"
    with pytest.raises(ValueError, match="has no #### before its result"):
        short_answer({"answer": "42"})


def test_a_row_whose_answer_is_not_one_fails():
    for answer in ("unknown", "", "see the picture"):
        [score] = compared("\\boxed{42}", answer)
        assert score == RewardFailure(
            f"column 'answer' holds {answer!r}, which math-verify cannot read"
        )


def compared(text: str, answer: str) -> list:
    log = RewardLog(1)
    return Compare("answer")([text], answer=[answer], **log.arguments())


def test_each_completion_is_counted_by_its_reason():
    log = RewardLog(1)
    chat = [{"role": "assistant", "content": "It is 41."}]
    assert Compare("answer")([chat], answer=[42], **log.arguments()) == [0.0]
    assert log.extra == {"math": ["wrong"], "answer": ["41"]}
    assert log.metrics == {f"math/{name}": [float(name == "wrong")] for name in REASONS}


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "<answer>1/2</answer>"], "1/2"),
        (["#### 1,234", "so 1234 apples"], "1234"),
        (["\\boxed{1 + x}", "\\boxed{x+1}"], "x + 1"),
        (["\\boxed{" + "7" * 3000 + "}"], "7" * 200),
        (["I do not know", "\\boxed{}"], None),
    ],
)
def test_equal_answers_have_one_text_by_which_they_vote(texts, answer):
    assert {judged(text, "42")[1] for text in texts} == {answer}


def test_a_column_that_is_not_there():
    with pytest.raises(KeyError, match=r"no column 'result'; it has \['answer'\]"):
        Compare("result")(["42"], log_extra=None, log_metric=None, answer=["42"])


def test_it_sets_no_signal_and_survives_what_sympy_raises(monkeypatch):
    def broken(*_, **__):
        raise RecursionError("deep")

    monkeypatch.setattr("signal.signal", broken)
    monkeypatch.setattr("signal.alarm", broken)
    assert judged("\\boxed{42}", "42")[0] == "right"
    monkeypatch.setattr("math_verify.verify", broken)
    assert judged("\\boxed{42}", "42")[0] == "unreadable"


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(math_answers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"`pip install 'math-verify>=0\.9,<0\.10'`"):
        MathVerify()
    cfg = (Path(__file__).parents[3] / "setup.cfg").read_text()
    assert cfg.count("    math-verify>=0.9,<0.10\n") == 2  # the extra [math], and dev


def test_workers_get_it_ready_to_compare():
    again = pickle.loads(pickle.dumps(Compare("answer")))
    assert (again.column, again.__name__) == ("answer", "math_verify")
