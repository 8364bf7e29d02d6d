"""A judge that ``vllm serve`` runs is held to a schema: even a random model's answers are read."""

import asyncio

import pytest

from lightning_rl import RankingJudge, RubricJudge
from lightning_rl.extend import OpenAIJudge
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import RolloutStatus
from tests.support.served_models import served
from tests.support.tiny_models import save_chat_model

pytest.importorskip("vllm")

CRITERIA = ["It is short.", {"text": "It is right.", "weight": 3, "most": 5, "name": "right"}]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Return the address and name of a random model that reads bytes, which a server runs."""
    model = tmp_path_factory.mktemp("judge")
    save_chat_model(model, "qwen2_5")
    # JSON may have any number of spaces between its parts, and a random model never ends them.
    compact = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    with served(model, "--structured-outputs-config", compact) as url:
        yield url, str(model)


def graded(reward, make_rollout):
    group = [
        make_rollout([2], [3], sample_index=i, completion=f"Answer {i}.", reward=None)
        for i in range(4)
    ]
    asyncio.run(Rewards([reward]).grade([group]))
    return group


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_a_rubric_is_filled_in(judge, make_rollout, together):
    group = graded(RubricJudge(OpenAIJudge(*judge), CRITERIA, together=together), make_rollout)
    assert [r.error for r in group] == [None] * 4
    for rollout in group:
        short, right = rollout.extra["rubric_points"]
        assert short in (0, 1)
        assert right in range(6)
        # (1 short + 3 right/5)/4
        assert rollout.reward == pytest.approx((short + 3 * right / 5) / 4)
        assert rollout.reward_parts["rubric/right"] == right / 5


@pytest.mark.slow
def test_a_group_is_ranked(judge, make_rollout):
    reward = RankingJudge(OpenAIJudge(*judge), at_once=3, both_orders=True)
    group = graded(reward, make_rollout)
    assert [r.error for r in group] == [None] * 4
    # Of each two answers, one gets what the other lacks: the shares of four sum to 6 pairs / 3.
    assert sum(r.reward for r in group) == pytest.approx(2.0)
    assert all(0 <= r.reward <= 1 for r in group)


@pytest.mark.slow
def test_without_a_schema_what_a_random_model_says_is_no_verdict(judge, make_rollout):
    for reward in (RubricJudge, RankingJudge):
        options = {"criteria": CRITERIA} if reward is RubricJudge else {}
        model = OpenAIJudge(*judge, options={"max_tokens": 32}, structured=False)
        group = graded(reward(model, **options), make_rollout)
        assert {r.status for r in group} == {RolloutStatus.FAILED}
        assert all("no JSON object with" in r.error for r in group)
