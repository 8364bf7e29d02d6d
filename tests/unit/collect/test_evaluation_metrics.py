"""What an evaluation says of held-out rollouts, set by set."""

import pytest

from lightning_rl.collect.stats import evaluation_metrics
from lightning_rl.envs import stats as env_stats
from lightning_rl.errors import DataError
from lightning_rl.rollout import Prompt


@pytest.fixture
def rollout_of(make_rollout):
    """A rollout of a prompt set, with its reward."""

    def make(prompt_set: str, reward: float):
        rollout = make_rollout([3], [4], reward=reward, group_id=f"{prompt_set}/{reward}")
        rollout.prompt = Prompt("p", "text", [3], set=prompt_set)
        return rollout

    return make


def test_a_set_without_rollouts_is_left_out(rollout_of):
    rows = evaluation_metrics(
        [rollout_of("sums", 1.0), rollout_of("sums", 0.0)], {"sums": 1, "x": 1}
    )
    assert rows["eval/accuracy"] == rows["eval/sums/accuracy"] == 0.5
    assert not [name for name in rows if name.startswith("eval/x/")]


def test_a_set_that_nobody_knows_is_named(rollout_of):
    with pytest.raises(DataError, match=r"prompt set 'y', which has no success_reward.*'sums'"):
        evaluation_metrics([rollout_of("y", 1.0)], {"sums": 1.0})


@pytest.mark.parametrize("measure", [evaluation_metrics, env_stats.evaluation_metrics])
def test_nothing_to_evaluate_is_said(measure):
    with pytest.raises(DataError, match="there are no"):
        measure([], 1.0)
