"""Test what torchrl's losses of DQN and SAC get from our agents, and what they make of it."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.envs import (
    ActionCritic,
    ActorCritic,
    GRUBody,
    MLPBody,
    OffPolicyModule,
    QAgent,
    SACAgent,
)
from lightning_rl.envs.networks.space import Continuous, Discrete, MultiDiscrete, Observed, Space
from lightning_rl.envs.off_policy import loss_of
from lightning_rl.errors import ConfigError

SEEN = {"observation": Observed((3,))}
CHOICE = Space(SEEN, {"action": Discrete(4)})
LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
REAL = Space(SEEN, {"action": Continuous(LOW, HIGH)})
CHAIN = Space({"observation": Observed((2,))}, {"action": Discrete(2)})


def steps_of(seen, action, reward, after, terminated):
    """Return steps in torchrl's form, of whatever shape the rewards are."""
    over = terminated.unsqueeze(-1)
    following = {"reward": reward.unsqueeze(-1), "done": over, "terminated": over, **after}
    return TensorDict({**seen, "action": action, "next": following}, reward.shape[:1])


def random_steps(action, *places, count=12):
    draw = torch.Generator().manual_seed(0)
    shape = (count, *places)
    seen, after = torch.randn(2, *shape, 3, generator=draw)
    reward, over = torch.randn(shape, generator=draw), torch.rand(shape, generator=draw) < 0.3
    return steps_of({"observation": seen}, action, reward, {"observation": after}, over)


def built(agent, space, gamma=0.5):
    """Return the agent and its loss."""
    torch.manual_seed(1)
    agent.build(space)
    return agent, loss_of(agent, gamma)


# ---------------------------------------------------------------- values of actions


ONLINE, TARGET = [[1.0, 0.0], [3.0, 5.0]], [[0.0, 0.0], [7.0, 2.0]]


@pytest.mark.parametrize(
    ("double", "step", "error"),
    [
        # In state 1 the learning network takes action 1, which the target network gives 2:
        # 1 + 0.5 x 2 - 1 = 1.
        (True, (0, 0, 1.0, 1, False), 1.0),
        # The target network itself takes action 0, for 7: 1 + 0.5 x 7 - 1 = 3.5.
        (False, (0, 0, 1.0, 1, False), 3.5),
        # Nothing follows an end: 1 - 5 = -4.
        (True, (1, 1, 1.0, 0, True), -4.0),
    ],
)
@pytest.mark.parametrize("loss_function", ["l2", "smooth_l1"])
def test_a_chain_of_two_states(double, step, error, loss_function):
    given = {"double_dqn": double, "loss_function": loss_function}
    agent, loss = built(QAgent(MLPBody([]), loss=given), CHAIN)
    layer = agent.head.layer
    nn.init.zeros_(layer.bias)
    layer.weight.data.copy_(torch.tensor(ONLINE).T)
    [bias] = [p for p in loss.target_value_network_params.values(True, True) if p.ndim == 1]
    [weight] = [p for p in loss.target_value_network_params.values(True, True) if p.ndim == 2]
    bias.zero_()
    weight.copy_(torch.tensor(TARGET).T)
    seen, action, reward, after, over = (torch.tensor([part]) for part in step)
    one = torch.eye(2)
    steps = steps_of({"observation": one[seen]}, action, reward, {"observation": one[after]}, over)
    found = loss(steps)
    # 1 is where smooth_l1 turns from half the square to a line.
    expected = error**2 if loss_function == "l2" else abs(error) - 0.5
    assert found["loss"].item() == pytest.approx(expected)
    measured = agent.measured(steps, found)
    assert measured["value/mean"].item() == max(ONLINE[step[0]])


def test_a_group_learns_as_each_alone():
    _, loss = built(QAgent(MLPBody([8])), Space(SEEN, {"action": Discrete(4)}, agents=2))
    steps = random_steps(torch.randint(4, (12, 2)), 2)
    alone = [loss(steps.apply(lambda t, i=i: t[:, i], batch_size=[12]))["loss"] for i in (0, 1)]
    torch.testing.assert_close(loss(steps)["loss"], sum(alone) / 2)


@pytest.mark.parametrize("one_hot", [False, True])
def test_actions_that_are_not_allowed_have_no_value(one_hot):
    space = Space(
        SEEN | {"move_mask": Observed((4,), torch.uint8)}, {"move": Discrete(4, one_hot=one_hot)}
    )
    agent, loss = built(QAgent(MLPBody([8])), space)
    action = torch.zeros(12, dtype=torch.long)
    steps = random_steps(nn.functional.one_hot(action, 4) if one_hot else action)
    allowed = torch.tensor([1, 0, 1, 0], dtype=torch.uint8).expand(12, -1)
    steps["move_mask"] = allowed
    # Nothing is allowed any more.
    steps["next", "move_mask"] = allowed * ~steps["next", "terminated"]
    found = loss(steps)["loss"]
    found.backward()
    assert bool(found.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in agent.parameters())
    chosen = agent.act({key: steps[key] for key in space.observations})[0]["move"].mode()
    assert set((chosen.argmax(-1) if one_hot else chosen).tolist()) <= {0, 2}


# ---------------------------------------------------------------- real-valued actions


def sac(**arguments):
    agent = SACAgent(MLPBody([8], "relu"), critic=ActionCritic(hidden=[8]), loss=arguments)
    return built(agent, REAL)


def test_critics_learn_from_the_smaller_of_their_targets():
    """Two critics that say 3 and 5 whatever they see, and a reward of 1, after which nothing is."""
    agent, loss = sac()
    for key, weights in loss.qvalue_network_params.items(True, True):
        if "value_layer" in key:
            weights.data.zero_()
            if key[-1] == "bias":
                weights.data.copy_(torch.tensor([[3.0], [5.0]]))
    reward, over = torch.ones(12), torch.ones(12, dtype=torch.bool)
    seen = {"observation": torch.randn(12, 3)}
    found = loss(steps_of(seen, LOW + torch.rand(12, 2) * (HIGH - LOW), reward, seen, over))
    assert found["loss_qvalue"].item() == pytest.approx((3 - 1) ** 2 + (5 - 1) ** 2)
    measured = agent.measured(None, found)
    assert measured["value/mean"].item() == pytest.approx(3, abs=1e-5)
    assert measured["policy/temperature"].item() == 1


def test_each_loss_of_sacs_moves_one_part():
    agent, loss = sac(alpha_init=0.3)
    parts = agent.parts() | agent.further_parts(loss)
    parts["actor"] += parts.pop("body")
    for key, moved in (("actor", "actor"), ("qvalue", "critic"), ("alpha", "temperature")):
        loss.zero_grad()
        loss(random_steps(torch.zeros(12, 2)))[f"loss_{key}"].backward()
        for name, part in parts.items():
            touched = [p.grad is not None and bool(p.grad.any()) for p in part]
            assert any(touched) == (name == moved)
    trained = {p for part in parts.values() for p in part}
    assert trained == {p for p in loss.parameters() if p.requires_grad}
    assert "temperature" not in agent.further_parts(sac(fixed_alpha=True)[1])


def test_the_entropy_to_aim_at_does_not_depend_on_the_bounds():
    _, loss = sac()
    # -2 for actions in [-1, 1]; the first is twice as wide, the second half as wide.
    assert float(loss.target_entropy) == pytest.approx(-2 + math.log(2) + math.log(0.5))
    assert float(sac(target_entropy=-1.5)[1].target_entropy) == -1.5
    critic = ActionCritic(hidden=[8])
    critic.build(REAL, REAL.actions["action"])
    ends = torch.stack([LOW, HIGH])
    unit = []
    critic.layers.register_forward_pre_hook(lambda _, given: unit.append(given[0][:, 3:]))
    critic({"observation": torch.zeros(2, 3)}, ends)
    assert unit[0].tolist() == [[-1, -1], [1, 1]]


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("agent", "space", "message"),
    [
        (QAgent(), REAL, "QAgent compares the values of n actions, .* Continuous .*SACAgent"),
        (SACAgent(), CHOICE, "SACAgent makes real numbers, .* Discrete .*QAgent"),
        (QAgent(), Space(SEEN, {"a": MultiDiscrete((2, 2))}), "takes MultiDiscrete"),
        (QAgent(), Space(SEEN, {"a": Discrete(2), "b": Discrete(2)}), r"2 \(a, b\)"),
    ],
)
def test_agents_that_do_not_fit(agent, space, message):
    with pytest.raises(ConfigError, match=message):
        agent.build(space)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QAgent(GRUBody()), "body=GRUBody has a memory"),
        (lambda: SACAgent(critic=ActionCritic(GRUBody())), "body=GRUBody has a memory"),
        (lambda: SACAgent(actor_lr=-1.0), "actor_lr=-1.0 must be >= 0"),
        (lambda: ActionCritic(hidden=[0]), r"hidden\[0\]=0 must be >= 1"),
        (lambda: OffPolicyModule({"agent": ActorCritic()}), "ExploringAgent, got ActorCritic"),
        (lambda: OffPolicyModule(gamma=1.5), r"gamma=1.5 must be in \[0, 1\]"),
        (lambda: OffPolicyModule(batch_size=0), "batch_size=0 must be >= 1"),
        (lambda: OffPolicyModule(warmup_frames=-1), "warmup_frames=-1 must be >= 0"),
        (lambda: OffPolicyModule(capacity=0), "capacity=0 must be >= 1"),
        (lambda: OffPolicyModule(target_every=0), "target_every=0 must be >= 1"),
        (lambda: OffPolicyModule(tau=0.0), r"tau=0.0 must be in \(0, 1\]"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_functoin": "l1"}, "DQNLoss takes no 'loss_functoin'; did you mean loss_function"),
        ({"reduction": "sum"}, "reduction cannot be set"),
        ({"action_space": "binary"}, "action_space cannot be set"),
    ],
)
def test_arguments_that_the_loss_does_not_take(arguments, message):
    agent = QAgent(loss=arguments)
    agent.build(CHOICE)
    with pytest.raises(ConfigError, match=message):
        loss_of(agent, 0.5)
