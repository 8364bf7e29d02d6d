"""Test the parts of a rerun with a change: which rollouts it leaves out, weights, new rewards."""

from math import log

import pytest

from lightning_rl.cli.rerun.change import RerunChange, _parts, _weigh
from lightning_rl.cli.rerun.retraining import effective_share
from lightning_rl.errors import DataError


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("11/3/p/0", ["11/3/p/0"]),
        ("11/3", ["11/3/p/0", "11/3/p/1"]),
        ("11/3/", ["11/3/p/0", "11/3/p/1"]),
        ("11", ["11/3/p/0", "11/3/p/1", "11/30/p/0"]),
        ("1", ["1/1/p/0"]),
        ("11/3/p/", ["11/3/p/0", "11/3/p/1"]),
        ("12", []),
    ],
)
def test_a_beginning_of_an_id_ends_before_a_slash(make_rollout, name, left_out):
    places = [("11/3/p", 0), ("11/3/p", 1), ("11/30/p", 0), ("1/1/p", 0)]
    rollouts = [make_rollout([3], [4, 1], group_id=group) for group, _ in places]
    for rollout, (_, index) in zip(rollouts, places, strict=True):
        rollout.sample_index = index
    change = RerunChange((name,))
    assert [r.id for r in rollouts if change.leaves_out(r)] == left_out


def test_keys_of_one_policy_and_of_several_are_told_alike():
    assert _parts("model.init_args.optimizer.init_args.lr") == ["model", "optimizer", "lr"]
    assert _parts("model.init_args.policies.a.init_args.loss") == ["model", "loss"]
    assert _parts("data.selection.init_args.filters") == ["data", "selection", "filters"]


def test_the_effective_share_is_kishs():
    assert effective_share([2.0, 2.0, 2.0]) == 1.0
    assert effective_share([log(3), 0.0]) == pytest.approx(0.8)  # (3 + 1)^2 / (2 (9 + 1))
    assert effective_share([1000.0, 0.0, 0.0, 0.0]) == 0.25  # one counts; and nothing overflows


def test_a_reward_is_weighed_anew_if_it_is_the_sum_of_its_parts(make_rollout):
    rollout = make_rollout([3], [4, 1])
    rollout.reward_parts = {"exact": 1.0, "format": 0.5, "format/spaces": 9.0, "style": None}
    rollout.reward_weights, rollout.reward = {"exact": 1.0, "format": 2.0, "style": 1.0}, 2.0
    _weigh(rollout, {"exact": 3.0, "format": 0.0, "style": 1.0})
    assert rollout.reward == 3.0
    rollout.reward = 7.0  # a callback's doing
    with pytest.raises(DataError, match=r"is not the weighted sum .* \(7.0 recorded, 3.0 summed\)"):
        _weigh(rollout, {"exact": 1.0, "format": 1.0, "style": 1.0})
