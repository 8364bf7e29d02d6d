"""Rows of metrics of a run that goes on: the same keys, row by row, as if it had not stopped."""

import pytest
import torch

from lightning_rl import AsyncCollector
from lightning_rl.callbacks import Evaluate, RLCallback, StepTimer, WeightSync
from lightning_rl.envs import ActorCritic, ActorCriticModule, DQNModule, MLPBody, SACModule
from lightning_rl.extend import Periodic, TransformersAdapters
from lightning_rl.games import PSPG, GameRolesModule
from tests.support.small_run import SaveAfter, data_module, grpo, ppo, trainer_of
from tests.support.two_roles import group, roles_data, roles_module
from tests.unit.envs.test_off_policy_runs import data as transitions, small


class Rows(RLCallback):
    """What each iteration recorded."""

    def __init__(self) -> None:
        self.rows: dict[int, dict] = {}

    def on_iteration_end(self, trainer, pl_module, metrics) -> None:
        self.rows[pl_module.iteration] = self.rows.get(pl_module.iteration, {}) | metrics


class OwnStage(RLCallback):
    """Times something of its own, once."""

    def on_collect_start(self, trainer, pl_module) -> None:
        if pl_module.iteration == 1:
            with pl_module.clock("simulator"):
                pass


def games(model):
    policies = {name: group(minibatches=2) for name in ("first", "second")}
    return GameRolesModule(str(model), policies, PSPG(rank=2, rho=1.0), [["first"], ["second"]], 7)


def roles(model):
    return roles_module(model, second={"schedule": Periodic(every=2)})


RUNS = {
    "grpo": (grpo, lambda: data_module(iterations_per_epoch=6)),
    "ppo": (ppo, lambda: data_module(iterations_per_epoch=6)),
    "async": (grpo, lambda: data_module(iterations_per_epoch=6, collector=AsyncCollector(1))),
    "roles": (roles, lambda: roles_data(iterations_per_epoch=6)),
    "games": (
        games,
        lambda: roles_data(iterations_per_epoch=6, engine=TransformersAdapters(device="cpu")),
    ),
    "dqn": (lambda model: small(DQNModule), lambda: transitions(DQNModule, 6, eval_episodes=2)),
    "sac": (lambda model: small(SACModule), lambda: transitions(SACModule, 6, eval_episodes=2)),
    "actor_critic": (
        lambda model: ActorCriticModule({"agent": ActorCritic(MLPBody([16], "relu"))}, seed=3),
        lambda: transitions(DQNModule, 6, eval_episodes=2),
    ),
}


ENVIRONMENTS = ("dqn", "sac", "actor_critic")


def fitted(name, tiny_model, path, *callbacks, ckpt_path=None):
    make, data = RUNS[name]
    rows, module, datamodule = Rows(), make(tiny_model), data()
    torch.manual_seed(0)
    own = [] if name in ENVIRONMENTS else [WeightSync()]
    timers = [StepTimer(), OwnStage()]
    tests = [Evaluate(2)] if datamodule.evaluates else []
    trainer = trainer_of(path, [*own, *timers, *tests, *callbacks, rows], logger=False)
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    return rows.rows


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_on_has_the_same_keys_row_by_row(name, after, tiny_model, tmp_path):
    saved = tmp_path / "saved.ckpt"
    whole = fitted(name, tiny_model, tmp_path, SaveAfter(after, saved))
    rest = fitted(name, tiny_model, tmp_path / "again", ckpt_path=str(saved))
    assert list(rest) == [*range(after, 7)]
    assert {n: sorted(row) for n, row in rest.items()} == {n: sorted(whole[n]) for n in rest}
