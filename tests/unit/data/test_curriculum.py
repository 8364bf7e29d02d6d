"""PassRateCurriculum: which prompts are drawn, what it learns, and that a resumed run agrees."""

import json

import numpy as np
import pytest

from lightning_rl.data.curriculum import PassRateCurriculum, row_at
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.models.policy import load_tokenizer


@pytest.fixture
def curriculum(tiny_model):
    def make(count=4, rows=None, prompts=None, **options) -> PassRateCurriculum:
        rows = rows or [{"prompt": f"{n}=", "uid": f"u{n}"} for n in range(count)]
        made = PassRateCurriculum(IterablePrompts(rows, seed=5, **(prompts or {})), **options)
        made.load(load_tokenizer(str(tiny_model)))
        return made

    return make


@pytest.fixture
def graded(make_rollout):
    def make(prompt, rewards):
        rollouts = [make_rollout(prompt.token_ids, [3, 1], reward=reward) for reward in rewards]
        for rollout in rollouts:
            rollout.prompt = prompt
        return rollouts

    return make


def test_weights_follow_pass_rates_by_hand(curriculum, graded):
    made = curriculum(floor=0.1, memory=0.5)
    # Everything is at p = 1/2 in the beginning: 0.1 + 4 / 4.
    assert made.weights() == pytest.approx([1.1] * 4)
    made.observe([graded(made[0], [1, 1, 1, 1]), graded(made[1], [0, 0, 0, 1])])
    # p = (1/2 + 1) / 2 = 3/4 and (1/2 + 1/4) / 2 = 3/8.
    assert made.pass_rates.tolist() == [0.75, 0.375, 0.5, 0.5]
    assert made.weights() == pytest.approx([0.1 + 0.75, 0.1 + 0.9375, 1.1, 1.1])
    made.observe([graded(made[0], [1, None, 1])])  # a rollout that could not be graded
    assert made.pass_rates[0] == 0.875


def test_a_group_that_could_not_be_graded_teaches_nothing(curriculum, graded):
    made = curriculum()
    made.observe([graded(made[0], [None, None])])
    assert made.pass_rates.tolist() == [0.5] * 4


def test_rows_lie_at_their_share_of_the_weights_by_hand():
    weights = np.array([1.0, 0.0, 2.0, 1.0, 0.0])
    shares = (0.0, 0.24, 0.25, 0.74, 0.75, 0.999)
    assert [row_at(weights, share) for share in shares] == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_share_leads_to_a_row_of_no_weight(count):
    weights = np.array([0.0] * count + [1e-300] + [0.0] * count)
    assert {row_at(weights, share) for share in np.nextafter([0.0, 1.0], 0.5)} == {count}


def test_success_is_a_reward_of_at_least(curriculum, graded):
    made = curriculum(success_reward=0.5, memory=0.0)
    made.observe([graded(made[0], [0.4, 0.5, 0.6, 0.1])])
    assert made.pass_rates[0] == 0.5
    made.observe([graded(made[0], [0.4, 0.5, 0.6, 0.7])])
    assert made.pass_rates[0] == 0.75


def test_prompts_are_drawn_in_proportion_to_their_weights(curriculum, graded):
    made = curriculum(floor=0.05, memory=0.0)
    # Never, always, in a quarter and in half of the cases: weights 0.05, 0.05, 0.8 and 1.05.
    rewards = {"0": [0] * 4, "1": [1] * 4, "2": [0, 0, 0, 1], "3": [0, 0, 1, 1]}
    made.observe([graded(made[int(i)], r) for i, r in rewards.items()])
    counts = dict.fromkeys(rewards, 0)
    for _ in range(4000):
        (prompt,) = made.draw(1)
        counts[prompt.id] += 1
        made.observe([graded(prompt, rewards[prompt.id])])  # the same again
    expected = [n / 1.95 for n in (0.05, 0.05, 0.8, 1.05)]
    assert [n / 4000 for n in counts.values()] == pytest.approx(expected, abs=0.03)


def test_what_is_under_way_is_not_drawn_again(curriculum, graded):
    made = curriculum(count=8)
    drawn = made.draw(8)
    assert len({prompt.id for prompt in drawn}) == 8
    made.observe([graded(prompt, [0, 1]) for prompt in drawn])
    again = made.draw(3) + made.draw(5)
    assert len({prompt.id for prompt in again}) == 8
    assert len(made.draw(3)) == 3  # all eight are under way: from the beginning


def test_ids_and_columns_are_those_of_the_prompts(curriculum, graded):
    made = curriculum(prompts={"id_column": "uid", "prompt_column": "prompt"}, memory=0.0)
    assert {p.id for p in made.draw(4)} == {"u0", "u1", "u2", "u3"}
    made.observe([graded(made[2], [1, 1])])
    assert made.pass_rates.tolist() == [0.5, 0.5, 1.0, 0.5]
    assert made.first(2)[1].columns == {"uid": "u1"}


def test_groups_of_other_prompts_are_ignored(curriculum, graded):
    made, larger = curriculum(), curriculum(count=9)
    made.observe([graded(larger[8], [1, 1])])
    assert made.pass_rates.tolist() == [0.5] * 4


def test_ids_must_differ(curriculum):
    rows = [{"prompt": "1=", "uid": "a"}, {"prompt": "2=", "uid": "a"}]
    with pytest.raises(DataError, match="'uid' is not unique"):
        curriculum(rows=rows, prompts={"id_column": "uid"})


def test_long_prompts_are_dropped_and_never_drawn(curriculum):
    rows = [{"prompt": "1" * n + "="} for n in (1, 9, 1, 9)]
    made = curriculum(rows=rows, prompts={"max_prompt_tokens": 4})
    assert {p.id for p in made.draw(20)} == {"0", "2"}
    assert made.dropped == 2
    with pytest.raises(DataError, match="all 2 prompts are longer than max_prompt_tokens=4"):
        curriculum(rows=rows[1::2], prompts={"max_prompt_tokens": 4}).draw(1)


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"memory": 1.0}, {"memory": -0.1}])
def test_impossible_values_are_refused(curriculum, options):
    with pytest.raises(ConfigError, match="need floor > 0 and memory"):
        curriculum(**options)


def test_a_resumed_run_draws_and_learns_the_same(curriculum, graded):
    random = np.random.default_rng(0)
    outcomes = random.integers(0, 2, size=(40, 4)).tolist()

    def step(made, number):
        prompts = made.draw(3)
        # One of three is still under way when the next are drawn.
        made.observe([graded(prompt, outcomes[number]) for prompt in prompts[1:]])
        return [prompt.id for prompt in prompts]

    whole = curriculum(count=12)
    expected = [step(whole, number) for number in range(40)]
    for stopped in (0, 7, 23):
        first = curriculum(count=12)
        assert [step(first, number) for number in range(stopped)] == expected[:stopped]
        second = curriculum(count=12)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [step(second, number) for number in range(stopped, 40)] == expected[stopped:]
        assert second.pass_rates.tolist() == whole.pass_rates.tolist()


def test_another_seed_draws_another_order(tiny_model):
    def order(seed):
        rows = [{"prompt": f"{n}="} for n in range(30)]
        made = PassRateCurriculum(IterablePrompts(rows, seed=seed))
        made.load(load_tokenizer(str(tiny_model)))
        return [prompt.id for prompt in made.draw(30)]

    assert order(1) == order(1) != order(2)
