"""Test batches of environments in torchrl's own parts, and torchrl's losses in our modules."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss
from torchrl.objectives.value import GAE

from lightning_rl import EntropyBonus, PPOClip
from lightning_rl.envs import (
    ActorCriticModule,
    EnvDataModule,
    GRUBody,
    Gym,
    StepGAE,
    TorchRLLoss,
    steps_of,
)
from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.errors import ConfigError
from lightning_rl.extend import ValueLoss, as_torchrl, pack_rollouts
from tests.support.env_agents import agent_for
from tests.support.small_run import Rows, trainer_of
from tests.support.torchrl_losses import DISCRETE, Values, built, compare, loss_of, rows

WALK = Gym("tests.support.worlds:Walk-v0")


def batch_of(env, envs=3, steps=40, **options):
    made = GymCollector(env, None, 60.0)
    made.start(0, 0, envs)
    agents = agent_for(made, **options)
    return handed_out(made.collect(agents, 0, steps), made.agents), agents, made


def test_a_batch_is_laid_out_as_torchrls():
    batch, agents, _ = batch_of(WALK)
    assert batch.batch_size == (3, 40)
    after = batch["next"]
    places, moves = batch["observation"][..., 0], torch.where(batch["action"] == 1, 1.0, -1.0)
    # What followed is what the step led to, also where the episode ended or was cut with it.
    assert (after["observation"][..., 0] == places + moves).all()
    assert (after["reward"].squeeze(-1) == 5.0 * (places + moves >= 5) - 1.0).all()
    assert (after["done"] == (after["terminated"] | after["truncated"])).all()
    assert after["terminated"].any()
    assert after["truncated"].any()
    assert not batch["done"].any()
    assert {after[k].shape for k in ("reward", "done", "terminated", "truncated")} == {(3, 40, 1)}
    steps = steps_of(batch, agents)
    assert steps["agent", "rewards"].data_ptr() == after["reward"].data_ptr()  # no copy
    assert torch.equal(steps["agent", "logprobs"], batch["action_log_prob"])


def test_a_memory_and_several_agents_have_their_places():
    batch, _, _ = batch_of(WALK, body=GRUBody(hidden=8), share_body=True)
    assert batch["recurrent_state"].shape == (3, 40, 8)
    assert batch["is_init"].shape == (3, 40, 1)
    flags = torch.zeros(2, 3, dtype=torch.bool)
    own = {
        "observations": {"seen": torch.ones(2, 3, 4)},
        "actions": {"act": torch.zeros(2, 3)},
        "logprobs": torch.zeros(2, 3),
        "rewards": torch.ones(2, 3),
    }
    steps = TensorDict({"done": flags, "terminated": flags, "one": own, "two": own}, [2, 3])
    last = {"observations": {"seen": torch.zeros(2, 4)}}
    ends = TensorDict({"place": torch.tensor([2, 5]), "one": last, "two": last}, [2])
    space = Space({"seen": Observed((4,))}, {"act": Discrete(2)})
    collected = TensorDict({"steps": steps, "ends": ends}, [])
    batch = handed_out(collected, {"one": space, "two": space})
    assert batch["two", "act"].shape == (2, 3)
    assert batch["next", "one", "reward"].shape == (2, 3, 1)
    assert batch["next", "one", "seen"][:, -1].eq(0).all()


def test_a_name_that_a_batch_needs_is_refused():
    space, none = Space({"reward": Observed((4,))}, {"act": Discrete(2)}), torch.zeros(1, 1).bool()
    collected = TensorDict(
        {
            "steps": TensorDict(
                {"done": none, "terminated": none, "agent": {"observations": {}}}, [1, 1]
            ),
            "ends": TensorDict({}, [1]),
        },
        [],
    )
    with pytest.raises(ConfigError, match=r"observation or action 'reward'.*rename it"):
        handed_out(collected, {"agent": space})


def test_torchrls_buffer_and_advantages_take_it():
    batch, agents, _ = batch_of(WALK)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
    buffer.extend(batch)
    assert len(buffer) == 3  # environments, T steps each
    buffer.extend(batch)
    steps = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
    steps.extend(batch.reshape(-1))
    assert len(steps) == 120
    assert steps.sample()["next", "reward"].shape == (4, 1)

    agent = agents["agent"]
    values = ValueOperator(Values(agent), in_keys=["observation"])
    found = GAE(gamma=0.9, lmbda=0.8, value_network=values)(batch.clone())
    ours = ActorCriticModule(advantage=StepGAE(gamma=0.9, lam=0.8, normalize=False))
    ours.agents["agent"] = agent
    learned = ours.rows_of("agent", batch)[0].learned
    torch.testing.assert_close(
        found["advantage"].flatten(), learned["advantages"], rtol=1e-5, atol=1e-5
    )


def test_torchrls_ppo_takes_it():
    batch, _, _ = batch_of(WALK)
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(2, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )
    critic = ValueOperator(nn.Linear(2, 1), in_keys=["observation"])
    GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)
    found = ClipPPOLoss(actor, critic)(batch.reshape(-1))
    found["loss_objective"].backward()
    assert found["loss_critic"].isfinite()


def test_torchrls_sac_takes_it():
    batch, _, _ = batch_of(Gym("tests.support.worlds:Reach-v0"))
    net = nn.Sequential(nn.Linear(1, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        default_interaction_type=InteractionType.RANDOM,
    )

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, observation, action):
            return self.layer(torch.cat([observation, action], -1))

    value = ValueOperator(Critic(), in_keys=["observation", "action"])
    loss = SACLoss(actor, value, action_spec=None, target_entropy=-2.0)
    found = loss(batch.reshape(-1))
    assert found["loss_qvalue"].isfinite()


# ---------------------------------------------------------------- torchrl's losses in our module


@pytest.mark.parametrize("kind", ["ClipPPOLoss", "A2CLoss", "PPOLoss"])
def test_a_loss_of_torchrls_is_what_it_is_alone(kind):
    import torchrl.objectives

    make = getattr(torchrl.objectives, kind)
    options = {"entropy_coeff": 0.02, "critic_coeff": 0.7, "loss_critic_type": "l2"}
    module = ActorCriticModule(loss=TorchRLLoss(f"torchrl.objectives.{kind}", options))
    compare(module, lambda actor, critic: make(actor, critic, **options), DISCRETE)


def test_it_is_our_own_ppo_where_both_say_the_same():
    options = {"clip_epsilon": 0.2, "entropy_coeff": 0.01, "critic_coeff": 0.5}
    theirs = ActorCriticModule(
        loss=TorchRLLoss("torchrl.objectives.ClipPPOLoss", options | {"loss_critic_type": "l2"})
    )
    ours = ActorCriticModule(
        loss=PPOClip(0.2, 0.2), value_loss=ValueLoss(1.0), entropy=EntropyBonus(0.01)
    )
    agent = built(DISCRETE)
    own = rows(agent)
    own.learned["weights"][:3] = 0  # left out of both
    torch.testing.assert_close(loss_of(theirs, agent, own), loss_of(ours, agent, own))


def test_a_run_learns_with_it(tmp_path):
    module = ActorCriticModule(
        loss=TorchRLLoss("torchrl.objectives.ClipPPOLoss", {"clip_epsilon": 0.1}), seed=0
    )
    seen = Rows()
    data = EnvDataModule(WALK, num_envs=4, frames_per_iteration=64, iterations_per_epoch=2, seed=0)
    trainer_of(tmp_path, [seen]).fit(module, datamodule=data)
    assert {"policy/objective_loss", "policy/critic_loss", "policy/kl_old"} <= seen.rows[-1].keys()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: TorchRLLoss("torchrl.objectives.ClipPPOLos"),
            "model.loss.make: .*ClipPPOLos",
        ),
        (
            lambda: TorchRLLoss("torchrl.objectives.ClipPPOLoss", {"clip_epsilom": 1}),
            "takes no 'clip_epsilom'; did you mean clip_epsilon",
        ),
        (
            lambda: TorchRLLoss("torchrl.objectives.SACLoss"),
            "SACLoss does not work on single steps of an actor",
        ),
        (
            lambda: TorchRLLoss("torchrl.objectives.KLPENPPOLoss"),
            "Could not find the probabilistic module",
        ),
        (lambda: TorchRLLoss("builtins.dict"), "builtins.dict is not a loss"),
        (
            lambda: TorchRLLoss("torchrl.objectives.ClipPPOLoss", {"reduction": "sum"}),
            "reduction cannot be set",
        ),
        (
            lambda: ActorCriticModule(
                loss=TorchRLLoss("torchrl.objectives.ClipPPOLoss"), entropy=EntropyBonus(0.1)
            ),
            "entropy cannot be combined with loss=TorchRLLoss",
        ),
        (
            lambda: ActorCriticModule(
                loss=TorchRLLoss("torchrl.objectives.ClipPPOLoss"), value_loss=ValueLoss(0.1)
            ),
            "value_loss cannot be combined with loss=TorchRLLoss",
        ),
        (
            lambda: ActorCriticModule(loss=ClipPPOLoss),
            "expected PolicyLoss or StepLoss, got",
        ),
    ],
)
def test_what_is_no_loss_of_steps_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


# ---------------------------------------------------------------- packed batches


def test_a_packed_batch_says_what_to_call(make_rollout):
    rollouts = [make_rollout([3, 4], [5]), make_rollout([6], [7, 8, 1])]
    batch = pack_rollouts(rollouts)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    for use in (
        lambda: buffer.extend(batch),
        lambda: batch[0],
        lambda: batch.clone()[:1],
    ):
        with pytest.raises(
            ConfigError, match=r"as_torchrl\(batch\) has a row for each rollout, as_"
        ):
            use()
    buffer.extend(as_torchrl(batch))
    assert len(buffer) == 2
