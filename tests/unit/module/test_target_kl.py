"""Test target_kl: further passes over a batch are left out once one took the policy too far."""

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl.algos.advantages import GAE
from lightning_rl.algos.kl import beyond_target
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.module import ActorCriticModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.critic import Critic
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped
from tests.support.small_run import Rows
from tests.support.updates import sgd


@pytest.fixture
def passes_of(tiny_model, train_on, random_batch):
    """Return metrics and weights of one iteration with so many passes at most."""

    def train(passes: int, target_kl: float | None):
        recorder = Rows()
        module = PolicyModule(
            str(tiny_model),
            optimizer=sgd,
            update={"ppo_epochs": passes, "minibatches": 2, "target_kl": target_kl},
        )
        train_on(module, [random_batch(3)], callbacks=[recorder])
        [row] = recorder.rows
        return row, [p.detach().clone() for p in module.loaded_policy.parameters()]

    return train


def test_passes_end_with_the_first_that_went_beyond_the_target(passes_of):
    # The policy moves by its first pass, so that any positive target is passed by its second: the
    # second minibatch of the first pass is scored after the first one's step.
    row, weights = passes_of(5, 1e-12)
    plain_row, plain = passes_of(1, None)
    assert row["policy/passes"] == 1.0
    assert "policy/passes" not in plain_row
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, plain, strict=True))
    assert row["policy/kl_old"] == pytest.approx(plain_row["policy/kl_old"], rel=1e-6)


def test_a_target_that_is_not_reached_leaves_all_passes(passes_of):
    row, weights = passes_of(3, 1e6)
    plain_row, plain = passes_of(3, None)
    assert row["policy/passes"] == 3.0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, plain, strict=True))
    assert row["policy/loss"] == plain_row["policy/loss"]


@pytest.mark.parametrize(("target", "passes"), [(1e-12, 1.0), (1e6, 4.0)])
def test_in_environments_too(tmp_path, target, passes):
    recorder = Rows()
    data = EnvDataModule(
        Gym("CartPole-v1"), num_envs=2, frames_per_iteration=64, iterations_per_epoch=1, seed=0
    )
    trainer = Trainer(
        default_root_dir=tmp_path, max_epochs=1, accelerator="cpu",
        callbacks=[recorder], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(ActorCriticModule(target_kl=target), datamodule=data)
    assert recorder.rows[0]["policy/passes"] == passes


def test_what_is_compared_is_the_farthest_of_several_policies():
    losses = {"policy/a/loss": 1.0, "policy/b/loss": 1.0}
    assert beyond_target(0.1, losses | {"policy/a/kl_old": 0.05, "policy/b/kl_old": 0.2})
    assert not beyond_target(0.1, losses | {"policy/a/kl_old": 0.05})
    assert not beyond_target(0.1, {"policy/grad_norm": 0.0})  # nothing was left to train on
    with pytest.raises(ConfigError, match="does not measure"):
        beyond_target(0.1, {"policy/loss": 7.0})


@pytest.mark.parametrize("options", [{"target_kl": 0.0}, {"target_kl": 0.1, "ppo_epochs": 1}])
def test_a_target_that_could_do_nothing_is_refused(tiny_model, options):
    with pytest.raises(ConfigError, match="target_kl="):
        PolicyModule(str(tiny_model), **grouped(**({"ppo_epochs": 2} | options)))


def test_a_batch_without_a_spread_of_rewards_moves_nothing(tiny_model, train_on, random_batch):
    """Training goes on although all rollouts of a batch, whichever it is, are left out."""
    flat = random_batch(3)
    flat["rollouts", "reward"][:] = 1.0
    recorder = Rows()
    module = PolicyModule(
        str(tiny_model),
        optimizer=sgd,
        update={"ppo_epochs": 2, "minibatches": 2, "target_kl": 1e-12},
    )
    train_on(module, [flat, random_batch(4), flat.clone()], callbacks=[recorder])
    assert [row["policy/passes"] for row in recorder.rows] == [2.0, 1.0, 2.0]
    assert "policy/loss" not in recorder.rows[0]


def test_a_critic_that_warms_up_alone_moves_no_policy(tiny_model, train_on, random_batch):
    recorder = Rows()
    critic = Critic(SharedValueHead(detach=True), warmup_iterations=1)
    module = PolicyModule(
        str(tiny_model), GAE(), critic=critic, optimizer=sgd,
        update={"ppo_epochs": 3, "minibatches": 2, "target_kl": 1e-12},
    )  # fmt: skip
    train_on(module, [random_batch(3), random_batch(4)], callbacks=[recorder])
    assert [row["policy/passes"] for row in recorder.rows] == [3.0, 1.0]
