"""PPO beside how torchrl, Stable-Baselines3 and CleanRL do it: begin, credit, updates, schedule."""

import copy

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_rl.callbacks import RLCallback
from lightning_rl.envs import (
    ActorCritic,
    ActorCriticModule,
    EnvDataModule,
    GaussianHead,
    Gym,
    MLPBody,
    StepGAE,
)
from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.space import Continuous, Discrete, Observed, Space
from lightning_rl.envs.rows import Rows, rows_of
from lightning_rl.run.seeding import derived_generator
from tests.support import worlds  # registers the environments
from tests.support.env_agents import agent_for
from tests.support.small_run import trainer_of

SPACE = Space({"observation": Observed((3,))}, {"action": Discrete(4)})
LR, EPS, CLIP, MAX_NORM = 1e-2, 1e-5, 0.2, 0.5
EPOCHS, MINIBATCHES, COUNT = 2, 3, 24


def adam(parameters):
    return torch.optim.Adam(parameters, lr=LR, eps=EPS)


# ---------------------------------------------------------------- where it begins


def test_an_agent_begins_orthogonal_with_the_usual_gains():
    bounds = torch.ones(2)
    space = Space({"observation": Observed((3,))}, {"action": Continuous(-bounds, bounds)})
    agent = ActorCritic(MLPBody([8, 8]), GaussianHead())
    agent.build(space)
    first, second = agent.body.layers[0], agent.body.layers[2]
    head = agent.heads["action"]
    torch.testing.assert_close(first.weight.T @ first.weight, 2 * torch.eye(3))
    torch.testing.assert_close(second.weight @ second.weight.T, 2 * torch.eye(8))
    torch.testing.assert_close(head.layer.weight @ head.layer.weight.T, 1e-4 * torch.eye(2))
    torch.testing.assert_close(agent.value_layer.weight @ agent.value_layer.weight.T, torch.eye(1))
    assert not any(p.any() for name, p in agent.named_parameters() if name.endswith("bias"))
    assert not head.log_std.any()
    critic = agent.critic_body.layers[0]
    torch.testing.assert_close(critic.weight.T @ critic.weight, 2 * torch.eye(3))
    assert not torch.equal(critic.weight, first.weight)


def test_adam_is_the_one_of_the_others():
    (group,) = ActorCriticModule().optimizer([nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["eps"], group["betas"]) == (3e-4, 1e-5, (0.9, 0.999))
    assert group["weight_decay"] == 0


# ---------------------------------------------------------------- credit


def walked(right, steps):
    """Return a batch of a walk one way, and an agent to whom a place is worth its number."""
    made = GymCollector(Gym(f"{worlds.__name__}:Walk-v0"), None, 60.0)
    made.start(0, 0, 1)
    agent = agent_for(made, body=MLPBody([]))[AGENT]
    with torch.no_grad():
        agent.heads["action"].layer.bias.copy_(torch.tensor([-50.0, 50.0] if right else [50, -50]))
        agent.value_layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    return agent, handed_out(made.collect({AGENT: agent}, 0, steps), made.agents)


def test_where_an_episode_is_cut_at_its_time_limit_the_value_of_what_was_seen_last_stands_in():
    agent, batch = walked(right=False, steps=9)
    rows, _ = rows_of(agent, AGENT, batch, StepGAE(gamma=0.5, lam=1.0, normalize=False))
    start = float(rows.observations["observation"][0, 0])
    assert batch["next", "done"].flatten().nonzero().flatten().tolist() == [7]
    assert not batch["next", "terminated"].any()
    # Eight steps of -1, and then the place where it was cut, not where the next episode begins.
    earned = -sum(0.5**t for t in range(8))
    assert float(rows.learned["returns"][0]) == pytest.approx(earned + 0.5**8 * (start - 8))
    assert float(rows.learned["returns"][7]) == pytest.approx(-1 + 0.5 * (start - 8))
    # The batch ends in the next episode's first step.
    begun = float(rows.observations["observation"][8, 0])
    assert float(rows.learned["returns"][8]) == pytest.approx(-1 + 0.5 * (begun - 1))


def test_nothing_stands_in_where_an_episode_came_to_its_end():
    agent, batch = walked(right=True, steps=8)
    rows, _ = rows_of(agent, AGENT, batch, StepGAE(gamma=0.5, lam=1.0, normalize=False))
    start = int(rows.observations["observation"][0, 0])
    last = 5 - start - 1
    assert bool(batch["next", "terminated"][0, last, 0])
    earned = -sum(0.5**t for t in range(last)) + 0.5**last * 4
    assert float(rows.learned["returns"][0]) == pytest.approx(earned)
    assert float(rows.learned["returns"][last]) == 4


# ---------------------------------------------------------------- the update


def steps_of(agent, critic_error):
    """Return rows that the agent took, with credit that was drawn, and a critic far off."""
    draw = torch.Generator().manual_seed(0)
    observations = {"observation": torch.randn(COUNT, 3, generator=draw).double()}
    with torch.no_grad():
        made, values = agent(observations)
    torch.manual_seed(0)
    action = made["action"].sample()
    drawn = torch.randn(COUNT, generator=draw).double()
    learned = {
        "old_logprobs": made["action"].log_prob(action),
        "advantages": drawn,
        "values": values,
        "returns": values + critic_error * drawn,
        "weights": torch.ones(COUNT).double(),
    }
    return Rows(observations, {"action": action}, learned)


def written_out(agent, rows, seed, jointly, per_minibatch):
    """Write out cleanRL's update (ppo.py), on minibatches in our order."""
    actor = [*agent.body.parameters(), *agent.heads.parameters()]
    critic = [*agent.critic_body.parameters(), *agent.value_layer.parameters()]
    optimizer = adam(actor + critic)
    for epoch in range(EPOCHS):
        order = torch.randperm(COUNT, generator=derived_generator(seed, 0, epoch))
        for places in order.tensor_split(MINIBATCHES):
            made, values = agent({k: v[places] for k, v in rows.observations.items()})
            own = {key: value[places] for key, value in rows.learned.items()}
            logprobs = made["action"].logits.log_softmax(-1)
            taken = logprobs[torch.arange(len(places)), rows.actions["action"][places]]
            ratio = (taken - own["old_logprobs"]).exp()
            credit = own["advantages"]
            if per_minibatch:
                credit = (credit - credit.mean()) / (credit.std(unbiased=False) + 1e-8)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = torch.max(-credit * ratio, -credit * clipped).mean()
            value_loss = 0.5 * ((values - own["returns"]) ** 2).mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            for part in [actor + critic] if jointly else [actor, critic]:
                nn.utils.clip_grad_norm_(part, MAX_NORM)
            optimizer.step()


@pytest.mark.parametrize("jointly", [True, False])
@pytest.mark.parametrize("per_minibatch", [True, False])
def test_an_update_is_the_one_that_is_written_out(jointly, per_minibatch):
    torch.manual_seed(0)
    agent = ActorCritic(MLPBody([8, 8]))
    agent.build(SPACE)
    agent.double()
    rows = steps_of(agent, critic_error=30.0)
    expected = copy.deepcopy(agent)
    written_out(expected, rows, 5, jointly, per_minibatch)
    module = ActorCriticModule(
        optimizer=adam,
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
        clip_jointly=jointly,
        normalize_minibatches=per_minibatch,
        seed=5,
    )
    module.agents[AGENT] = agent
    Fabric(accelerator="cpu", devices=1).setup(module, module.configure_optimizers())
    module.update({AGENT: rows}, (4, 6))
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(
            agent.get_parameter(name),
            weight,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n} {m}",
        )


def test_a_critic_that_is_far_off_slows_its_actor_only_if_both_are_clipped_by_one_norm():
    moved = {}
    for jointly in (True, False):
        torch.manual_seed(0)
        agent = ActorCritic(MLPBody([8, 8]))
        agent.build(SPACE)
        rows = steps_of(agent.double(), critic_error=1e6)
        module = ActorCriticModule(
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
            epochs=1,
            minibatches=1,
            clip_jointly=jointly,
            seed=0,
        )
        module.agents[AGENT] = agent
        Fabric(accelerator="cpu", devices=1).setup(module, module.configure_optimizers())
        weight = agent.heads["action"].layer.weight
        before = weight.detach().clone()
        module.update({AGENT: rows}, (4, 6))
        moved[jointly] = float((weight.detach() - before).norm())
    assert moved[True] < 1e-3 * moved[False]


def test_advantages_are_normalised_once_of_the_batch_or_of_each_minibatch():
    agent, batch = walked(right=False, steps=9)
    for per_minibatch in (False, True):
        module = ActorCriticModule(normalize_minibatches=per_minibatch)
        module.agents[AGENT] = agent
        credit = module.rows_of(AGENT, batch)[0].learned["advantages"]
        assert (abs(float(credit.mean())) < 1e-6) is not per_minibatch
    plain = ActorCriticModule(advantage=StepGAE(normalize=False), normalize_minibatches=True)
    assert not plain.normalize_minibatches  # none were asked for


# ---------------------------------------------------------------- the learning rate


class Rates(RLCallback):
    """Records the learning rates of the batches."""

    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_a_rate_is_annealed_once_per_iteration_to_nothing(tmp_path):
    module = ActorCriticModule(
        optimizer=adam,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=4),
        epochs=2,
        minibatches=2,
    )
    data = EnvDataModule(
        Gym(f"{worlds.__name__}:Walk-v0"), 2, 16, iterations_per_epoch=4, eval_episodes=0
    )
    rates = Rates()
    trainer_of(tmp_path, [rates], logger=False).fit(module, data)
    # CleanRL's 1 - (update - 1) / num_updates.
    assert rates.rates == pytest.approx([LR, 0.75 * LR, 0.5 * LR, 0.25 * LR])
