"""Compare losses on steps of environments with torchrl's, in float64."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from lightning_rl.envs import (
    ActorCritic,
)
from lightning_rl.envs.networks.space import Continuous, Discrete, Observed, Space
from lightning_rl.envs.rows import Rows

DISCRETE = Space({"observation": Observed((3,))}, {"action": Discrete(4)})


BOUNDS = torch.ones(2)


REAL = Space({"observation": Observed((3,))}, {"action": Continuous(-BOUNDS, BOUNDS)})


def built(space, seed=0, **options):
    torch.manual_seed(seed)
    agent = ActorCritic(**options)
    agent.build(space)
    return agent.double()


def rows(agent, count=24, seed=0):
    """Return steps that another policy took, with credit."""
    draw = torch.Generator().manual_seed(seed)
    places = (count, *([agent.space.agents] if agent.space.agents else []))
    observations = {"observation": torch.randn(*places, 3, generator=draw).double()}
    with torch.no_grad():
        made, values = agent(observations)
    torch.manual_seed(seed)
    action = made["action"].sample()
    noise = torch.randn(4, *places, generator=draw).double()
    learned = {
        "old_logprobs": made["action"].log_prob(action).detach() + 0.3 * noise[0],
        "advantages": noise[1],
        "values": values + 0.1 * noise[2],
        "returns": noise[3],
        "weights": torch.ones(places).double(),
    }
    return Rows(observations, {"action": action}, learned)


class Values(nn.Module):
    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, observation):
        return self.agent.values({"observation": observation}).unsqueeze(-1)


def as_torchrl(agent, own):
    """Return the same agent and steps, as torchrl has them."""
    kind = agent.space.actions["action"]

    class Parameters(nn.Module):
        def __init__(self):
            super().__init__()
            self.agent = agent

        def forward(self, observation):
            made, _ = self.agent({"observation": observation})
            only = made["action"]
            if isinstance(kind, Discrete):
                return only.logits
            return only.mean, only.log_std.exp().expand_as(only.mean)

    class Normal(torch.distributions.Independent):
        def __init__(self, loc, scale):
            super().__init__(torch.distributions.Normal(loc, scale), 1)

    out = ["logits"] if isinstance(kind, Discrete) else ["loc", "scale"]
    actor = ProbabilisticActor(
        TensorDictModule(Parameters(), ["observation"], out),
        in_keys=out,
        distribution_class=torch.distributions.Categorical if len(out) == 1 else Normal,
    )
    critic = ValueOperator(Values(agent), in_keys=["observation"])
    steps = TensorDict(
        {
            "observation": own.observations["observation"],
            "action": own.actions["action"],
            "action_log_prob": own.learned["old_logprobs"],
            "advantage": own.learned["advantages"].unsqueeze(-1),
            "value_target": own.learned["returns"].unsqueeze(-1),
            "state_value": own.learned["values"].unsqueeze(-1),
        },
        [len(own.learned["advantages"])],
    )
    with torch.no_grad():
        steps.update(actor.get_dist_params(steps.clone()).select(*out))
    return actor, critic, steps


def loss_of(module, agent, own):
    module.agents["agent"] = agent
    everything = torch.arange(len(own.learned["advantages"]))
    made, values = agent(own.observations, own.state, own.begins)
    return module._loss(made, values, own, module._old("agent", own), everything)[0]


def gradients(loss, agent):
    agent.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}


def compare(module, make, space):
    agent = built(space)
    own = rows(agent)
    actor, critic, steps = as_torchrl(agent, own)
    theirs = make(actor, critic)(steps)
    total = sum(value for key, value in theirs.items() if key.startswith("loss_"))
    ours = loss_of(module, agent, own)
    torch.testing.assert_close(ours.double(), total.double().squeeze(), rtol=1e-7, atol=1e-9)
    expected = gradients(total.squeeze(), agent)
    found = gradients(loss_of(module, agent, own), agent)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)
