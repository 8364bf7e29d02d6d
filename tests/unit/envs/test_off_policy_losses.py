"""Losses of DQN and SAC: by hand on two states, and against torchrl's own modules."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import DQNLoss, SACLoss

from lightning_rl.envs import (
    ActionCritic,
    DQNModule,
    DuelingHead,
    GRUBody,
    HuberTD,
    MLPBody,
    QAgent,
    QHead,
    SACAgent,
    SACModule,
    SquaredTD,
)
from lightning_rl.envs.algos.td import greedy_value, td_target
from lightning_rl.envs.networks.space import Continuous, Discrete, MultiDiscrete, Observed, Space
from lightning_rl.envs.transitions import Transitions
from lightning_rl.errors import ConfigError

SEEN = {"observation": Observed((3,))}
CHOICE = Space(SEEN, {"action": Discrete(4)})
LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
REAL = Space(SEEN, {"action": Continuous(LOW, HIGH)})
GAMMA = 0.875  # which torchrl, that keeps it in float32, has exactly
CHAIN = Space({"observation": Observed((2,))}, {"action": Discrete(2)})


def transitions(action, *places, count=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shape = (count, *places)
    seen, after = torch.randn(2, *shape, 3, generator=draw).double()
    return Transitions(
        {"observation": seen},
        action,
        torch.randn(shape, generator=draw).double(),
        {"observation": after},
        (torch.rand(shape, generator=draw) < 0.3),
    )


def as_torchrl(steps, action):
    after = {
        "observation": steps.following["observation"],
        "reward": steps.rewards.unsqueeze(-1),
        "done": steps.terminated.unsqueeze(-1),
        "terminated": steps.terminated.unsqueeze(-1),
    }
    known = {"observation": steps.observations["observation"], "action": action, "next": after}
    return TensorDict(known, [len(action)])


# ---------------------------------------------------------------- by hand


def chain(step):
    """One step of a chain: from state 0 by action 0 to state 1, for a reward of 1; or the last."""
    one = torch.eye(2).double()
    seen, action, reward, after, over = step
    return Transitions(
        {"observation": one[seen : seen + 1]},
        torch.tensor([action]),
        torch.tensor([reward]).double(),
        {"observation": one[after : after + 1]},
        torch.tensor([over]),
    )


def table(values):
    """An agent whose values are a table: of state s, row s."""
    agent = QAgent(MLPBody([]))
    agent.build(CHAIN)
    nn.init.zeros_(agent.head.layer.bias)
    agent.head.layer.weight.data = torch.tensor(values).T.clone()
    return agent.double()


ONLINE, TARGET = [[1.0, 0.0], [3.0, 5.0]], [[0.0, 0.0], [7.0, 2.0]]


@pytest.mark.parametrize(
    ("double", "step", "loss"),
    [
        # In state 1 the learning network takes action 1, which the target network gives 2:
        # 1 + 0.5 x 2 - 1 = 1, and half of its square.
        (True, (0, 0, 1.0, 1, False), 0.5),
        # The target network itself takes action 0, for 7: 1 + 0.5 x 7 - 1 = 3.5.
        (False, (0, 0, 1.0, 1, False), 0.5 * 3.5**2),
        # Nothing follows an end: 1 - 5 = -4.
        (True, (1, 1, 1.0, 0, True), 8.0),
    ],
)
def test_a_chain_of_two_states(double, step, loss):
    module = DQNModule(gamma=0.5, double=double, td_loss=SquaredTD())
    found, metrics = module.loss(table(ONLINE), table(TARGET), chain(step))
    assert found.tolist() == pytest.approx([loss])
    assert metrics["value/td_error"].tolist() == pytest.approx([math.sqrt(2 * loss)])


def test_values_of_a_chain_are_learned():
    """From 0 to 1 for nothing, then 1 and the end: values 0.5 and 1 with gamma = 0.5."""
    module, agent = DQNModule(gamma=0.5, td_loss=SquaredTD()), table([[0.0, -9.0], [0.0, -9.0]])
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.4)
    for _ in range(200):
        for step in ((0, 0, 0.0, 1, False), (1, 0, 1.0, 0, True)):
            optimizer.zero_grad()
            module.loss(agent, agent, chain(step))[0].sum().backward()
            optimizer.step()
    values = agent({"observation": torch.eye(2).double()})
    assert values[:, 0].tolist() == pytest.approx([0.5, 1.0], abs=1e-3)


def test_targets_and_greedy_values():
    following = torch.tensor([2.0, -torch.inf])
    found = td_target(torch.ones(2), following, torch.tensor([False, True]), 0.9)
    assert found.tolist() == pytest.approx([2.8, 1.0])
    values, chooser = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]])
    assert greedy_value(values, chooser).tolist() == [1.0]
    assert greedy_value(values, values).tolist() == [4.0]


def test_huber():
    loss = HuberTD(delta=2.0)(torch.tensor([1.0, 5.0]), torch.zeros(2))
    assert loss.tolist() == [0.5, 2 * (5 - 1)]
    with pytest.raises(ConfigError, match=r"HuberTD\(delta=0.0\) must be > 0"):
        HuberTD(0.0)


def test_the_temperature_rises_where_entropy_is_too_low():
    agent = SACAgent(target_entropy=-1.0)
    agent.build(REAL)
    for log_prob, sign in ((3.0, -1), (-3.0, 1)):  # an entropy of -3, and of 3
        agent.log_temperature.grad = None
        SACModule().temperature_loss(agent, torch.tensor([log_prob])).sum().backward()
        # d/d log alpha of -log alpha (log p + target): -(3 - 1), -(-3 - 1).
        assert agent.log_temperature.grad.item() == pytest.approx(-(log_prob - 1))
        assert agent.log_temperature.grad.item() * sign > 0


def test_the_entropy_to_aim_at_does_not_depend_on_the_bounds():
    agent = SACAgent()
    agent.build(REAL)
    # -2 for actions in [-1, 1]; the first is twice as wide, the second half as wide.
    assert agent.target_entropy == pytest.approx(-2 + math.log(2) + math.log(0.5))
    critic = agent.critics[0]
    ends = torch.stack([LOW, HIGH])
    unit = []
    critic.layers.register_forward_pre_hook(lambda _, given: unit.append(given[0][:, 3:]))
    critic({"observation": torch.zeros(2, 3)}, ends)
    assert unit[0].tolist() == [[-1, -1], [1, 1]]


# ---------------------------------------------------------------- against torchrl


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("td_loss", "theirs"), [(HuberTD(), "smooth_l1"), (SquaredTD(), "l2")])
@pytest.mark.parametrize("head", [QHead, DuelingHead])
def test_dqn_is_torchrls(double, td_loss, theirs, head):
    torch.manual_seed(1)
    agents = [QAgent(MLPBody([8], "relu"), head()) for _ in range(2)]
    for agent in agents:
        agent.build(CHOICE)
        agent.double()
    agent, target = agents
    action = torch.randint(4, (12,))
    steps = transitions(action)
    loss, _ = DQNModule(gamma=GAMMA, double=double, td_loss=td_loss).loss(agent, target, steps)
    loss.mean().backward()

    class Values(nn.Module):
        def __init__(self, agent):
            super().__init__()
            self.agent = agent

        def forward(self, observation):
            return self.agent({"observation": observation})

    actors = [
        QValueActor(Values(a), in_keys=["observation"], action_space="categorical")
        for a in (agent, target)
    ]
    reference = DQNLoss(
        actors[0],
        loss_function=theirs,
        delay_value=True,
        double_dqn=double,
        action_space="categorical",
    )
    reference.make_value_estimator(gamma=GAMMA)
    reference.target_value_network_params.data.update_(TensorDict.from_module(actors[1]).data)
    own = [p.grad.clone() for p in agent.parameters()]
    expected = reference(as_torchrl(steps, action))["loss"]
    factor = 0.5 if theirs == "l2" else 1.0  # ours is half of the square
    assert loss.mean().item() == pytest.approx(factor * expected.item(), rel=1e-12)
    agent.zero_grad()
    (factor * expected).backward()
    for ours, parameter in zip(own, reference.value_network_params.values(True, True), strict=True):
        assert torch.allclose(ours, parameter.grad, atol=1e-12)


def sac_pair():
    torch.manual_seed(2)
    agent = SACAgent(
        MLPBody([8], "relu"), critic=ActionCritic(hidden=[8]), temperature=0.3, target_entropy=-1.5
    )
    agent.build(REAL)
    target = SACAgent(critic=ActionCritic(hidden=[8]))
    target.build(REAL)
    # Means away from 0, and two critics that differ.
    nn.init.normal_(agent.policy.layer.weight)
    return agent.double(), target.double().critics


class Parameters(nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.body, self.policy = agent.body, agent.policy

    def forward(self, observation):
        seen = {"observation": observation}
        made = self.policy(self.body(seen), seen)
        return made.mean, made.log_std.exp()


class Value(nn.Module):
    def __init__(self, critic):
        super().__init__()
        self.critic = critic

    def forward(self, observation, action):
        return self.critic({"observation": observation}, action).unsqueeze(-1)


def sac_reference(agent, target):
    module = TensorDictModule(Parameters(agent), ["observation"], ["loc", "scale"])
    bounds = {"low": LOW.double(), "high": HIGH.double()}
    actor = ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    keys = ["observation", "action"]
    critics = [ValueOperator(Value(c), in_keys=keys) for c in agent.critics]
    reference = SACLoss(
        actor,
        critics,
        loss_function="l2",
        alpha_init=0.3,
        target_entropy=-1.5,
        delay_qvalue=True,
    ).double()
    reference.make_value_estimator(gamma=GAMMA)
    after = [TensorDict.from_module(ValueOperator(Value(c), in_keys=keys)) for c in target]
    reference.target_qvalue_network_params.data.update_(torch.stack(after).data)
    return reference


def test_sac_is_torchrls():
    agent, target = sac_pair()
    action = LOW + torch.rand(12, 2).double() * (HIGH - LOW)
    steps, module = transitions(action), SACModule(gamma=GAMMA)
    reference = sac_reference(agent, target)
    known = as_torchrl(steps, action)
    torch.manual_seed(3)  # the same noise for each of them
    critic, _ = module.critic_loss(agent, target, steps)
    torch.manual_seed(3)
    expected, _ = reference.qvalue_v2_loss(known)
    assert critic.mean().item() == pytest.approx(0.5 * expected.mean().item(), rel=1e-10)
    torch.manual_seed(4)
    made, log_prob = agent(steps.observations).rsample()
    actor = module.actor_loss(agent, steps, made, log_prob)
    torch.manual_seed(4)
    expected, told = reference.actor_loss(known)
    assert log_prob.tolist() == pytest.approx(told["log_prob"].flatten().tolist(), rel=1e-10)
    assert actor.mean().item() == pytest.approx(expected.mean().item(), rel=1e-10)
    temperature = module.temperature_loss(agent, log_prob).mean().item()
    expected = reference.alpha_loss(told["log_prob"]).mean().item()
    assert temperature == pytest.approx(expected, rel=1e-10)


def test_no_loss_of_sacs_moves_what_another_is_for():
    agent, target = sac_pair()
    action = torch.zeros(12, 2).double()
    steps, module = transitions(action), SACModule()
    critics = [p for critic in agent.critics for p in critic.parameters()]
    actor = [*agent.body.parameters(), *agent.policy.parameters()]
    torch.manual_seed(0)
    module.critic_loss(agent, target, steps)[0].sum().backward()
    alone = [p.grad.clone() for p in critics]
    assert all(p.grad is None for p in [*actor, agent.log_temperature])
    agent.zero_grad()
    torch.manual_seed(0)
    loss, metrics = module.loss(agent, target, steps)
    loss.sum().backward()
    # The actor's own loss leaves the critics' gradients as they were.
    assert all(torch.equal(p.grad, g) for p, g in zip(critics, alone, strict=True))
    assert all(p.grad is not None for p in [*actor, agent.log_temperature])
    assert all(p.grad is None for p in target.parameters())
    assert all(p.requires_grad for p in critics)
    assert all(value.shape == (12,) for value in metrics.values())


def test_a_group_learns_as_each_alone():
    team = Space(SEEN, {"action": Discrete(4)}, agents=2)
    agent = QAgent(MLPBody([8]))
    agent.build(team)
    agent.double()
    steps = transitions(torch.randint(4, (12, 2)), 2)
    loss, _ = DQNModule().loss(agent, agent, steps)
    assert loss.shape == (12, 2)
    one = Transitions(
        {"observation": steps.observations["observation"][:, 1]},
        steps.action[:, 1],
        steps.rewards[:, 1],
        {"observation": steps.following["observation"][:, 1]},
        steps.terminated[:, 1],
    )
    torch.testing.assert_close(DQNModule().loss(agent, agent, one)[0], loss[:, 1])


@pytest.mark.parametrize("name", ["action", "move"])
def test_actions_that_are_not_allowed_have_no_value(name):
    mask = f"{name}_mask"
    space = Space(SEEN | {mask: Observed((4,), torch.uint8)}, {name: Discrete(4)})
    agent = QAgent(MLPBody([8]))
    agent.build(space)
    agent.double()
    steps = transitions(torch.zeros(12, dtype=torch.long))
    allowed = torch.tensor([1, 0, 1, 0], dtype=torch.uint8).expand(12, -1)
    nothing = torch.where(steps.terminated.unsqueeze(-1), torch.zeros_like(allowed), allowed)
    masked = Transitions(
        dict(steps.observations) | {mask: allowed},
        steps.action,
        steps.rewards,
        dict(steps.following) | {mask: nothing},
        steps.terminated,
    )
    loss, _ = DQNModule().loss(agent, agent, masked)
    assert bool(loss.isfinite().all())  # also where nothing is allowed any more
    made, _ = agent.act(masked.observations)
    assert set(made[name].mode().tolist()) <= {0, 2}


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("agent", "space", "message"),
    [
        (QAgent(), REAL, "QAgent compares the values of n actions, .* Continuous .*SACModule"),
        (SACAgent(), CHOICE, "SACAgent makes real numbers, .* Discrete .*DQNModule"),
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
        (lambda: SACAgent(temperature=0.0), "temperature=0.0 must be > 0"),
        (lambda: SACAgent(actor_lr=-1.0), "actor_lr=-1.0 must be >= 0"),
        (lambda: ActionCritic(hidden=[0]), r"hidden\[0\]=0 must be >= 1"),
        (lambda: DQNModule(gamma=1.5), r"gamma=1.5 must be in \[0, 1\]"),
        (lambda: DQNModule(batch_size=0), "batch_size=0 must be >= 1"),
        (lambda: SACModule(warmup_frames=-1), "warmup_frames=-1 must be >= 0"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
