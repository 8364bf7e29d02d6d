"""Test a rollout of several rows: packed row by row, compared and averaged as one."""

import pytest
import torch

from lightning_rl import (
    GRPO,
    RLOO,
    PromptMean,
    ReinforcePlusPlus,
    RunningBaseline,
    SequenceMean,
    TokenMean,
    TokenSum,
)
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.rollout import Call, Rollout, Row, SamplingDistribution
from tests.support.doubles import EXACT, doubled


@pytest.fixture
def cut(make_rollout):
    """Make two groups of two; the first rollout's four tokens are a row, or rows of these sizes."""

    def make(*sizes: int) -> list[Rollout]:
        first = make_rollout([5, 6], [7, 8, 9, 1], reward=1.0)
        begin, rows = 0, []
        for size in sizes:
            tokens = [7, 8, 9, 1][begin : begin + size]
            rows.append(
                Row([5, 6, 7, 8, 9][: 2 + begin], tokens, [True] * size, [-1.0] * size, [0] * size)
            )
            begin += size
        first.rows = rows or first.rows
        return [
            first,
            make_rollout([5, 6], [4, 1], reward=0.0, sample_index=1),
            make_rollout([3], [4, 4, 1], group_id="b", reward=0.5),
            make_rollout([3], [2], group_id="b", reward=0.75, sample_index=1),
        ]

    return make


def test_rows_of_a_rollout_follow_one_another(cut):
    batch = pack_rollouts(cut(1, 3))
    rollouts = batch["rollouts"]
    assert rollouts["length"].tolist() == [3, 6, 4, 4, 2]
    assert rollouts["prompt_length"].tolist() == [2, 3, 2, 1, 1]
    assert rollouts["episode"].tolist() == [0, 0, 1, 2, 3]
    assert rollouts["group"].tolist() == [0, 0, 0, 1, 1]
    assert rollouts["reward"].tolist() == [1.0, 1.0, 0.0, 0.5, 0.75]
    assert batch["tokens", "input_ids"][:9].tolist() == [5, 6, 7, 5, 6, 7, 8, 9, 1]


@pytest.mark.parametrize(
    "advantage",
    [GRPO, RLOO, RunningBaseline, lambda: ReinforcePlusPlus(group_baseline=True)],
)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 1, 1, 1)])
def test_a_rollout_has_the_same_advantage_in_however_many_rows(advantage, cut, sizes):
    whole, parts = (advantage()(doubled(pack_rollouts(cut(*shape)))) for shape in ((), sizes))
    of_whole, of_parts = (
        batch["tokens", "advantages"][batch["tokens", "loss_mask"]] for batch in (whole, parts)
    )
    torch.testing.assert_close(of_parts, of_whole, rtol=0, atol=EXACT)


@pytest.mark.parametrize("aggregation", [TokenMean(), SequenceMean(), PromptMean(), TokenSum(10)])
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 1, 1, 1)])
def test_a_rollout_weighs_the_same_in_however_many_rows(aggregation, cut, sizes):
    whole, parts = (doubled(pack_rollouts(cut(*shape))) for shape in ((), sizes))
    of_whole, of_parts = (
        aggregation(batch)[batch["tokens", "loss_mask"]] for batch in (whole, parts)
    )
    torch.testing.assert_close(of_parts, of_whole, rtol=EXACT, atol=0)


def test_a_selection_keeps_its_episodes_apart(cut):
    chosen = select(doubled(pack_rollouts(cut(1, 3))), torch.tensor([1, 2, 4]))
    assert SequenceMean()(chosen)[chosen["tokens", "loss_mask"]].tolist() == pytest.approx(
        [1 / 9] * 3 + [1 / 6] * 2 + [1 / 3]
    )


def test_roles_are_compared_among_themselves(make_rollout):
    """The solvers got 1 and 0, the critics 0.5 and 0.25; advantages are worked out by hand."""
    group = []
    for index, (solver, critic) in enumerate([(1.0, 0.5), (0.0, 0.25)]):
        rollout = make_rollout([5], [7, 1], reward=9.0, sample_index=index)
        rollout.rows[0].role = "solver"
        rollout.rows.append(Row([6], [8], [True], [-1.0], [0], "critic"))
        rollout.role_rewards = {"solver": solver, "critic": critic}
        group.append(rollout)
    batch = GRPO(normalize_std=False)(pack_rollouts(group))
    assert batch["rollouts", "reward"].tolist() == [1.0, 0.5, 0.0, 0.25]
    found = batch["tokens", "advantages"][batch["tokens", "loss_mask"]]
    assert found.tolist() == [0.5, 0.5, 0.125, -0.5, -0.5, -0.125]


def test_rows_are_scored_as_each_was_sampled(make_rollout):
    rollout = make_rollout([5], [7, 1], temperature=0.7)
    colder = SamplingDistribution(temperature=0.5)
    rollout.rows.append(Row([6], [8], [True], [-1.0], [0], sampling=colder))
    batch = pack_rollouts([rollout])
    assert batch["rollouts", "temperature"].tolist() == pytest.approx([0.7, 0.5])


def test_rows_and_calls_survive_a_record(cut):
    rollout = cut(1, 3)[0]
    rollout.calls = [Call(0, 0, 1, seed=3, reward=0.5, state="start"), Call(1, 0, 3)]
    rollout.role_rewards = {"": 1.0}
    assert Rollout.from_dict(rollout.to_dict()) == rollout


def test_calls_of_a_plain_rollout_are_what_its_model_wrote(make_rollout):
    rollout = make_rollout([5], [7, 8, 2, 3, 1], loss_mask=[True, True, False, False, True])
    assert [(c.row, c.start, c.stop) for c in rollout.model_calls()] == [(0, 0, 2), (0, 4, 5)]
