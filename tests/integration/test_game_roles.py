"""A run of GameRolesModule: both learn, and a run that goes on ends as one that did not stop."""

import torch

from lightning_rl.callbacks import RLCallback, WeightSync
from lightning_rl.extend import TransformersAdapters
from lightning_rl.games import PSPG, GameRolesModule
from tests.support.small_run import SaveAfter, trainer_of
from tests.support.two_roles import group, roles_data


class Watch(RLCallback):
    """Rows of metrics."""

    def __init__(self):
        self.rows = []

    def on_iteration_end(self, trainer, pl_module, metrics):
        self.rows.append(metrics)


def fitted(tiny_model, path, callbacks=(), ckpt_path=None):
    torch.manual_seed(0)
    policies = {name: group(minibatches=2) for name in ("first", "second")}
    order, watch = [["first"], ["second"]], Watch()
    module = GameRolesModule(str(tiny_model), policies, PSPG(rank=2, rho=1.0), order, seed=7)
    data = roles_data(iterations_per_epoch=6, engine=TransformersAdapters(device="cpu"))
    trainer = trainer_of(path, [WeightSync(), *callbacks, watch])
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, watch.rows


def test_both_learn_and_a_run_goes_on_as_if_it_never_stopped(tiny_model, tmp_path):
    saved = tmp_path / "four.ckpt"
    module, rows = fitted(tiny_model, tmp_path, [SaveAfter(4, saved)])
    assert module.role_versions == {"first": 6, "second": 6}
    assert rows[-1]["reward/mean"] > 2 * rows[1]["reward/mean"]
    assert rows[1]["policy/first/shaping"] > 0
    assert all(row["policy/second/shaping"] == 0 for row in rows[1:])
    again, rest = fitted(tiny_model, tmp_path, ckpt_path=saved)
    assert len(rest) == 3
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
