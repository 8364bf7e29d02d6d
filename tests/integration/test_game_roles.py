"""Test a run of GameRolesModule: both players learn, and only the first one looks ahead."""

import pytest
import torch

from lightning_rl.callbacks import WeightSync
from lightning_rl.extend import TransformersAdapters
from tests.support.resumed import Trace
from tests.support.resumed_cases import game_roles
from tests.support.small_run import trainer_of
from tests.support.two_roles import roles_data

pytestmark = pytest.mark.slow


def test_both_learn(tiny_model, tmp_path):
    torch.manual_seed(0)
    module, trace = game_roles(str(tiny_model)), Trace()
    data = roles_data(iterations_per_epoch=6, engine=TransformersAdapters(device="cpu"))
    trainer_of(tmp_path, [WeightSync(), trace]).fit(module, data)
    rows = trace.rows
    assert module.role_versions == {"first": 6, "second": 6}
    assert rows[6]["reward/mean"] > 2 * rows[1]["reward/mean"]
    assert rows[1]["policy/first/shaping"] > 0
    assert all(rows[n]["policy/second/shaping"] == 0 for n in range(1, 7))
