"""Test MathVerify in its processes: what a model wrote can stop neither it nor the run."""

import asyncio
import threading

import pytest

from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.math_answers import REASONS, MathVerify

pytest.importorskip("math_verify")

TEXTS = {
    "\\boxed{42}": "right",
    "<answer>41</answer>": "wrong",
    "\\boxed{9^{9^{9^9}}}": "fault",  # a number of 370 million digits, and its power
    "9**9**9**9": "fault",
    "<think>\\boxed{42}": "unfinished_thought",
    "": "no_answer",
}
HOSTILE = [
    "\\boxed{" * 3000,
    "(" * 20_000,
    "\\frac{" * 2000 + "1" + "}{1}" * 2000,
    "\\boxed{" + "1" * 20_000 + "}",
    "__import__('os').abort()",
    "\\boxed{__import__('os').abort()}",
    "\0\ufffd\U0001f600" * 500,
]


@pytest.fixture(scope="module")
def reward():
    reward = MathVerify(workers=1, timeout_s=2.0)
    yield reward
    reward.close()


def graded(reward, make_rollout, texts):
    group = [make_rollout([3], [4], reward=None) for _ in texts]
    for rollout, text in zip(group, texts, strict=True):
        rollout.prompt.columns = {"answer": "42"}
        rollout.completion = text
    asyncio.run(Rewards([reward]).grade([group]))
    return group


@pytest.mark.slow
def test_what_never_ends_costs_its_completion_the_score_and_is_counted(reward, make_rollout):
    group = graded(reward, make_rollout, list(TEXTS))
    assert [r.extra["math"] for r in group] == list(TEXTS.values())
    assert [r.reward for r in group] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    counts = {name: list(TEXTS.values()).count(name) / len(TEXTS) for name in REASONS}
    assert group[0].logged == {f"math/{k}": pytest.approx(v) for k, v in counts.items()}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_a_hostile_text_scores_nothing_and_fails_nothing(reward, make_rollout, text):
    bad, good = graded(reward, make_rollout, [text, "\\boxed{42}"])
    assert (bad.reward, bad.error) == (0.0, None)
    assert bad.extra["math"] in REASONS
    assert good.reward == 1.0


@pytest.mark.slow
def test_it_grades_in_a_thread_where_no_signal_can_be_set(reward, make_rollout):
    found = []
    texts = ["\\boxed{42}", "\\boxed{9^{9^{9^9}}}"]
    thread = threading.Thread(target=lambda: found.extend(graded(reward, make_rollout, texts)))
    thread.start()
    thread.join()
    assert [r.reward for r in found] == [1.0, 0.0]
