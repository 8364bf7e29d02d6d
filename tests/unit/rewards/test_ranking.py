"""Test RankingJudge against a planted judge on a server: ranks, orders, blocks and every fault."""

import asyncio
from itertools import combinations

import pytest

from benchmarks.support.planted_judge import PlantedJudge, judging
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.judge_models import OpenAIJudge
from lightning_rl.rewards.ranking import RankingJudge, shares_beaten, shuffled, split
from lightning_rl.rollout import RolloutStatus
from recipes.sort_digits.prepare import make_tokenizer


def ranking(judge, **options):
    options = {"first_wait_s": 0.0, "timeout_s": 30.0} | options
    return RankingJudge(OpenAIJudge(judge.url, "planted"), **options)


def grade(reward, *completions, group="g"):
    count = len(completions)
    return asyncio.run(
        reward(prompts=["p"] * count, completions=list(completions), group_ids=[group] * count)
    )


@pytest.fixture
def judge():
    with judging(PlantedJudge()) as judge:
        yield judge


# ---------------------------------------------------------------- scores


def test_scores_are_ranks_and_ties_share_their_mean(judge):
    # Qualities 3, 9, 3, 1: ranks 2.5, 1, 2.5, 4 of 4, and (4 - rank)/3
    assert grade(ranking(judge), "a 3", "b 9", "c 3", "d 1") == [0.5, 1.0, 0.5, 0.0]
    assert len(judge.bodies) == 1


def test_equal_answers_are_shown_once_and_tie(judge):
    # Of 3 others each "x 5" beats two and ties with its double: 2.5/3; "y 4" beats one; "z 1" none.
    scores = grade(ranking(judge), "x 5", "y 4", "x 5", "z 1")
    assert scores == pytest.approx([2.5 / 3, 1 / 3, 2.5 / 3, 0.0])
    assert judge.bodies[0]["messages"][0]["content"].count("x 5") == 1


def test_where_there_is_nothing_to_compare_nothing_is_asked(judge):
    assert grade(ranking(judge), "a 3") == [0.5]
    assert grade(ranking(judge), "a 3", "a 3", "a 3") == [0.5, 0.5, 0.5]
    assert grade(ranking(judge), "<think>\n1", "a 3", "<think>\n2") == [0.0, 1.0, 0.0]
    assert not judge.bodies


def test_an_unfinished_thought_is_worse_than_any_answer(judge):
    # Of 3 others the best beats all, the next all but one, and the cut ones get 0.
    scores = grade(ranking(judge), "<think>\n9", "a 3", "b 7", "<think>\nc</think>d 5")
    assert scores == pytest.approx([0.0, 1 / 3, 1.0, 2 / 3])


@pytest.mark.parametrize("count", [2, 5, 8, 9, 16])
@pytest.mark.parametrize("both_orders", [False, True])
def test_a_consistent_judge_is_followed_at_any_size(judge, count, both_orders):
    texts = [f"answer {i} {(7 * i) % count}" for i in range(count)]
    reward = ranking(judge, at_once=4, both_orders=both_orders)
    # 7 divides no size, so all qualities from 0 to count - 1 occur.
    expected = [((7 * i) % count) / (count - 1) for i in range(count)]
    assert grade(reward, *texts) == pytest.approx(expected)
    blocks = 1 if count <= 4 else -(-count // 2)
    assert len(judge.bodies) == (1 + both_orders) * max(1, blocks * (blocks - 1) // 2)


def test_every_two_answers_meet_in_requests_of_a_bounded_size():
    for count, at_once in ((2, 2), (3, 2), (9, 8), (16, 8), (16, 5)):
        texts = {f"t{i}" for i in range(count)}
        requests = split(texts, at_once, "g")
        assert max(map(len, requests)) <= at_once
        met = {frozenset(pair) for each in requests for pair in combinations(each, 2)}
        assert len(met) == count * (count - 1) // 2


def test_what_two_answers_got_in_several_requests_is_averaged():
    # a beats b once, and ties once: 0.75; c loses to both.
    rankings = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1}]
    assert [*shares_beaten(["a", "b", "c"], rankings)] == [1.75 / 2, 1.25 / 2, 0.0]


# ---------------------------------------------------------------- orders


def test_the_order_depends_on_the_texts_and_the_group_alone(judge):
    texts = [f"answer {i} {i}" for i in range(6)]
    grade(ranking(judge), *texts)
    grade(ranking(judge), *texts[::-1])
    grade(ranking(judge), *texts, group="other")
    first, again, other = (body["messages"][0]["content"] for body in judge.bodies)
    assert first == again
    assert first != other


def test_both_orders_are_asked_where_they_are_wanted(judge):
    grade(ranking(judge, both_orders=True), "a 1", "b 2", "c 3")
    one, other = (shown(body) for body in judge.bodies)
    assert one == other[::-1]
    assert sorted(one) == ["a 1", "b 2", "c 3"]


def shown(body):
    lines = body["messages"][0]["content"].splitlines()
    return [lines[i + 1] for i, line in enumerate(lines) if line.startswith("<answer ")]


def test_with_both_orders_the_first_answer_gets_no_more_than_the_last():
    """In one order the first beats all, in both the first and the last do so once."""
    texts = ["a 5", "b 5", "c 5", "d 5"]
    order = shuffled(texts, "g")
    with judging(PlantedJudge(prefers_first=1.0)) as judge:
        one = dict(zip(texts, grade(ranking(judge), *texts), strict=True))
        both = dict(zip(texts, grade(ranking(judge, both_orders=True), *texts), strict=True))
    # Of three others: 1; 0 + 2 ties = 1/3.
    assert [one[text] for text in order] == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    # The mean of 1 and 1/3 for the first and the last; the others lose twice to one of two: 1/3.
    assert [both[text] for text in order] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_pairs_in_both_orders_give_nothing_to_any_place():
    with judging(PlantedJudge(prefers_first=1.0)) as judge:
        reward = ranking(judge, at_once=2, both_orders=True)
        assert grade(reward, "a 5", "b 5", "c 5", "d 5") == [0.5] * 4
        assert len(judge.bodies) == 4 * 3


# ---------------------------------------------------------------- faults


def statuses(reward, make_rollout):
    group = [
        make_rollout([2], [3], sample_index=i, completion=f"answer {i} {i}", reward=None)
        for i in range(6)
    ]
    asyncio.run(Rewards([reward]).grade([group]))
    return [r.status for r in group], {r.error.split("; prompt")[0] for r in group if r.error}


def test_a_judge_that_answers_in_prose_fails_the_group_with_one_message(make_rollout):
    with judging(PlantedJudge(prose=True)) as judge:
        found, errors = statuses(ranking(judge), make_rollout)
        assert len(judge.bodies) == 1
    assert found == [RolloutStatus.FAILED] * 6
    assert errors == {
        "reward ranking: no JSON object with 'A', 'B', 'C', 'D', 'E', 'F' in the judge's answer "
        "'They are all quite good.'"
    }


def test_a_server_that_goes_in_the_middle_fails_the_group_and_not_another(make_rollout):
    with judging(PlantedJudge(gone_after=4)) as judge:
        reward = ranking(judge, at_once=4, retries=0, max_concurrency=1)
        assert statuses(reward, make_rollout)[0] == [RolloutStatus.COMPLETED] * 6  # 3 requests
        found, errors = statuses(reward, make_rollout)
    assert found == [RolloutStatus.FAILED] * 6
    assert len(errors) == 1
    assert "gave no answer" in errors.pop()


def test_a_place_that_does_not_exist_fails_the_group(judge):
    judge.answer = lambda body: '{"A": 1, "B": 3}'
    told = "the judge's number 3 for 'B' is not a whole number from 1 to 2"
    assert grade(ranking(judge), "a 1", "b 2") == [RewardFailure(told)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at_once": 1}, "at_once=1 must be from 2 to 26"),
        ({"at_once": 27}, "at_once=27 must be from 2 to 26"),
        ({"question": "{prompt} {form}"}, "must show {answers}"),
        ({"retries": -1}, "retries=-1 must be >= 0"),
    ],
)
def test_impossible_settings_are_refused(judge, options, message):
    with pytest.raises(ConfigError, match=message):
        ranking(judge, **options)


@pytest.mark.parametrize(
    ("size", "at_once", "both", "requests", "shown"),
    [(4, 8, False, 1, 4), (4, 8, True, 2, 4), (8, 4, False, 6, 4), (1, 8, False, 0, 1)],
)
def test_a_group_is_known_to_ask_for_as_many_requests(size, at_once, both, requests, shown):
    judge = RankingJudge(
        OpenAIJudge("http://127.0.0.1:9/v1", "judge"), at_once=at_once, both_orders=both
    )
    tokenizer = make_tokenizer()
    asked = len(tokenizer.encode(judge.question.text)) + 3 + 10 * shown
    used = judge.usage(tokenizer, 3, 10, size)
    assert used == (requests, requests * asked, requests * 512)
