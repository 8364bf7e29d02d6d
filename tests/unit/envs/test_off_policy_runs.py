"""Test runs of DQN and SAC: they learn, and warm up."""

from typing import ClassVar

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.envs import (
    ActionCritic,
    EnvCollector,
    EnvDataModule,
    Gym,
    MLPBody,
    OffPolicyModule,
    QAgent,
    SACAgent,
)
from lightning_rl.envs.networks.actor_critic import joint_log_prob, sampled
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.extend import LinearSchedule, Periodic
from tests.support.small_run import Rows, trainer_of


def small(kind, seed=3, **options):
    if kind is QAgent:
        epsilon = LinearSchedule(start=0.5, final=0.0, iterations=4)
        agent = QAgent(MLPBody([16], "relu"), epsilon=epsilon)
    else:
        agent = SACAgent(MLPBody([16], "relu"), critic=ActionCritic(hidden=[16]))
    options = {"warmup_frames": 40, "updates_per_iteration": 2, "batch_size": 8} | options
    return OffPolicyModule({"agent": agent}, capacity=100, seed=seed, **options)


def data(kind=QAgent, iterations=8, **options):
    name = "CartPole-v1" if kind is QAgent else "Pendulum-v1"
    options = {"num_envs": 2, "frames_per_iteration": 20, "eval_episodes": 0, "seed": 3} | options
    return EnvDataModule(Gym(name), iterations_per_epoch=iterations, **options)


def fit(module, datamodule, tmp_path, *callbacks, **options):
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, callbacks, logger=False)
    trainer.fit(module, datamodule, **options)
    return trainer


@pytest.mark.parametrize("kind", [QAgent, SACAgent])
def test_the_same_seed_learns_the_same_and_another_something_else(kind, tmp_path):
    weights = []
    for seed in (3, 3, 4):
        module = small(kind, seed)
        fit(module, data(kind, 4), tmp_path)
        weights.append(torch.cat([p.flatten() for p in module.losses.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_nothing_is_learned_before_the_warm_up_is_over(tmp_path):
    rows, module = Rows(), small(QAgent)
    fit(module, data(iterations=4), tmp_path, rows)
    assert [row["policy/exploration"] for row in rows.rows] == [1.0, 1.0, 0.25, 0.125]
    assert ["value/loss" in row for row in rows.rows] == [False, True, True, True]
    assert [row["buffer/size"] for row in rows.rows] == [20, 40, 60, 80]
    assert module.buffer.added == 80
    assert int(module.updates) == 2 * 3


def test_random_actions_are_uniform(tmp_path):
    module = small(SACAgent, warmup_frames=10_000)
    fit(module, data(SACAgent, 2, frames_per_iteration=400), tmp_path)
    actions = module.buffer.sample(4000)["agent", "action"]
    # Uniform in [-2, 2]; of the buffer's last 100, the standard deviation of the mean is 0.12.
    assert abs(float(actions.mean())) < 5 * 0.12
    assert float(actions.std()) == pytest.approx(4 / 12**0.5, rel=0.25)


def targets_and_weights(tmp_path, **options):
    module = small(QAgent, **options)
    fit(module, data(iterations=4), tmp_path)
    assert int(module.updates) == 6
    loss = module.losses["agent"]
    return [
        torch.cat([p.flatten() for p in params.values(True, True)])
        for params in (loss.target_value_network_params, loss.value_network_params)
    ]


def test_targets_follow_after_as_many_updates_as_is_said(tmp_path):
    begin, now = targets_and_weights(tmp_path, tau=1.0, target_every=7)
    assert not torch.equal(begin, now)
    copied, now = targets_and_weights(tmp_path, tau=1.0, target_every=6)
    assert torch.equal(copied, now)
    moved, now = targets_and_weights(tmp_path, tau=0.25, target_every=6)
    torch.testing.assert_close(moved, 0.75 * begin + 0.25 * now)


def test_an_agent_that_is_not_due_only_acts(tmp_path):
    module = small(QAgent, warmup_frames=0)
    module.given_agents["agent"].schedule = Periodic(every=100, first=100)
    fit(module, data(iterations=3), tmp_path)
    assert int(module.updates) == 0
    assert module.buffer.added == 60


@pytest.mark.slow
def test_dqn_learns_to_balance(tmp_path):
    """A random policy holds the pole for 22 steps, and this has to do so twice as long."""
    epsilon = LinearSchedule(1.0, 0.05, iterations=80)
    module = OffPolicyModule(
        {"agent": QAgent(MLPBody([64, 64], "relu"), epsilon=epsilon)},
        tau=1.0,
        target_every=200,
        warmup_frames=500,
        batch_size=64,
        seed=0,
    )
    datamodule = data(num_envs=4, frames_per_iteration=32, iterations=110, eval_episodes=10, seed=0)
    trainer = fit(module, datamodule, tmp_path)
    [metrics] = trainer.validate(module, datamodule, verbose=False)
    assert metrics["eval/reward_mean"] > 44


class Signs(EnvCollector):
    """Rewards naming the sign that they see: two groups, a pair of agents and one alone.

    Every step is an episode. The one alone sees two things, of which one is noise.
    """

    agents: ClassVar = {
        "pair": Space({"sign": Observed((1,))}, {"say": Discrete(2)}, agents=2),
        "lone": Space(
            {"sign": Observed((1,)), "noise": Observed((2, 2), torch.uint8)}, {"name": Discrete(2)}
        ),
    }
    exact = ""

    def start(self, seed, first, num_envs):
        self.count = num_envs

    def seen(self, name, *shape):
        space = self.agents[name]
        shape = (*shape, *([space.agents] if space.agents else []))
        seen = {"sign": torch.randn(*shape, 1)}
        if "noise" in space.observations:
            seen["noise"] = torch.randint(255, (*shape, 2, 2), dtype=torch.uint8)
        return seen

    def acted(self, agents, name, *shape):
        seen = self.seen(name, *shape)
        made, _ = agents[name].act(seen)
        action = sampled(made, greedy=False)
        [(only, chosen)] = action.items()
        right = (chosen == (seen["sign"].squeeze(-1) > 0)).float()
        return {
            "observations": seen,
            "actions": {only: chosen},
            "logprobs": joint_log_prob(made, action),
            "rewards": right,
        }

    @torch.no_grad()
    def collect(self, agents, iteration, steps):
        shape = (self.count, steps)
        over = torch.ones(shape, dtype=torch.bool)
        own = {name: self.acted(agents, name, *shape) for name in self.agents}
        after = {name: {"observations": self.seen(name, 0)} for name in self.agents}
        steps = TensorDict({"done": over, "terminated": over} | own, shape)
        ends = TensorDict({"place": torch.zeros(0, dtype=torch.long)} | after, [0])
        return TensorDict({"steps": steps, "ends": ends}, [])

    def play(self, agents, seeds, greedy, render=False):
        raise NotImplementedError

    def close(self):
        pass


def test_groups_of_agents_learn_side_by_side(tmp_path):
    rows = Rows()
    bodies = {"pair": MLPBody([16], "relu"), "lone": MLPBody([16], "relu", observations=["sign"])}
    epsilon = LinearSchedule(1.0, 0.05, iterations=10)
    module = OffPolicyModule(
        {name: QAgent(body, epsilon=epsilon) for name, body in bodies.items()},
        gamma=0.0,
        warmup_frames=64,
        updates_per_iteration=10,
        batch_size=32,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
        seed=0,
    )
    datamodule = EnvDataModule(
        Gym("CartPole-v1"),
        collector=Signs(),
        num_envs=4,
        frames_per_iteration=64,
        iterations_per_epoch=30,
        eval_episodes=0,
    )
    fit(module, datamodule, tmp_path, rows)
    last = module.buffer.sample(4)
    assert last["pair", "next", "reward"].shape == (4, 2, 1)
    assert last["lone", "next", "noise"].dtype == torch.uint8
    for name in Signs.agents:
        assert rows.rows[-1][f"value/{name}/loss"] < 0.05
    signs = {"sign": torch.tensor([[-1.0], [1.0]])}
    assert module.agents["lone"].act(signs)[0]["name"].mode().tolist() == [0, 1]
    [group] = [g for g in module.optimizers().param_groups if g["name"] == "pair/critic"]
    assert group["params"][0] is next(module.agents["pair"].head.parameters())
