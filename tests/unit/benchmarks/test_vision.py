"""The benchmark of models that see: both ways compute the same, and the gap is one of rounding."""

import pytest
import torch

from benchmarks.vision import SeesAgain, gap_of
from lightning_rl.models.policy import Policy
from tests.support.tiny_vision import picture, save_vision_model
from tests.support.tolerances import rounding


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_that_runs_more_often_sees_the_same(tmp_path, family):
    policy = Policy(str(save_vision_model(tmp_path, family)))
    shown = [policy.reader.prepare(picture(seed)) for seed in (1, 2)]
    features = policy.reader.family.features
    once, again = features(policy.lm, shown), SeesAgain(features, 3)(policy.lm, shown)
    for one, other in zip([once.first, *once.deeper], [again.first, *again.deeper], strict=True):
        bound = rounding(additions=1_500, magnitude=float(one.abs().max()))
        torch.testing.assert_close(one, other[: len(one)], rtol=0, atol=bound)


def test_the_gap_is_one_of_rounding(tmp_path):
    gap = gap_of("llava", tmp_path)
    assert 0 < gap["mean"] < gap["max"] < 1e-4
