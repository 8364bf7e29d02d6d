"""An update on steps: losses against torchrl's own, gradients, schedules, and several agents."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss, ReinforceLoss

from lightning_rl import CISPO, GSPO, EntropyBonus, Reinforce, Surrogate
from lightning_rl.algos.losses import ValueLoss
from lightning_rl.envs import (
    ActorCritic,
    ActorCriticModule,
    Centralized,
    GRUBody,
    MLPBody,
    PerAgent,
    StepGAE,
    StepReturn,
)
from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.envs.rows import Clips, Rows, rows_of
from lightning_rl.errors import ConfigError
from lightning_rl.extend import AdaptiveEntropy, AdaptiveKL, Alternating, EveryIteration, Periodic
from lightning_rl.games import SimulationLoss
from tests.support.torchrl_losses import (
    DISCRETE,
    REAL,
    built,
    compare,
    loss_of,
    rows,
)

TEAM = Space({"observation": Observed((3,))}, {"action": Discrete(4)}, agents=2)


@pytest.mark.parametrize("space", [DISCRETE, REAL], ids=["discrete", "real"])
def test_clipped_ppo_is_torchrls(space):
    module = ActorCriticModule(entropy=EntropyBonus(0.25), value_loss=ValueLoss(1.0))

    def theirs(actor, critic):
        return ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=0.2,
            entropy_coeff=0.25,
            critic_coeff=0.5,
            loss_critic_type="l2",
            functional=False,
        )

    compare(module, theirs, space)


@pytest.mark.parametrize("space", [DISCRETE, REAL], ids=["discrete", "real"])
def test_penalised_ppo_is_torchrls(space):
    module = ActorCriticModule(
        loss=Surrogate(), kl=AdaptiveKL(0.5, target=None), value_loss=ValueLoss(1.0)
    )

    def theirs(actor, critic):
        return KLPENPPOLoss(
            actor,
            critic,
            beta=0.5,
            dtarg=1e9,
            decrement=1.0,
            entropy_bonus=False,
            critic_coeff=0.5,
            loss_critic_type="l2",
            functional=False,
        )

    compare(module, theirs, space)


def test_reinforce_is_torchrls():
    module = ActorCriticModule(loss=Reinforce(), value_loss=ValueLoss(2.0))

    def theirs(actor, critic):
        return ReinforceLoss(actor, critic, loss_critic_type="l2", functional=False)

    compare(module, theirs, DISCRETE)


def test_the_penalty_adapts_by_halves_and_doubles():
    kl = AdaptiveKL(1.0, target=0.1)
    for measured, expected in ((0.151, 2.0), (0.149, 2.0), (0.066, 1.0), (float("nan"), 1.0)):
        kl.update(measured)
        assert kl.value == expected
    other = AdaptiveKL(3.0)
    other.load_state_dict(kl.state_dict())
    assert other.value == 1.0


def test_a_bonus_adapts_to_the_mean_entropy_of_the_agents():
    module = ActorCriticModule(entropy=EntropyBonus(AdaptiveEntropy(target=0.5, step=0.25)))
    for before, after in ((0.0, 0.25), (0.25, 0.5)):
        metrics = {"policy/a/entropy": 0.25, "policy/b/entropy": 0.75}
        module.end_iteration(metrics)
        assert metrics["policy/entropy_coef"] == before
        assert module.entropy.at(1) == after
    assert module.state_of_parts() == {"entropy": {"value": 0.5, "is_low": True}}


def test_a_loss_does_not_depend_on_how_steps_are_dealt():
    agent, module = built(DISCRETE), ActorCriticModule(entropy=EntropyBonus(0.1))
    own = rows(agent)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    whole = loss_of(module, agent, own)
    torch.testing.assert_close(loss_of(module, agent, own.at(order)), whole)
    halves = [loss_of(module, agent, own.at(half)) for half in order.chunk(2)]
    torch.testing.assert_close(sum(halves) / 2, whole)


def test_steps_without_weight_do_not_count():
    agent, module = built(DISCRETE), ActorCriticModule(entropy=EntropyBonus(0.1))
    own = rows(agent)
    acts = torch.rand(24, generator=torch.Generator().manual_seed(0)) < 0.5
    own.learned["weights"] = acts.double()
    some = own.at(acts.nonzero().squeeze(1))
    torch.testing.assert_close(loss_of(module, agent, own), loss_of(module, agent, some))


def test_each_agent_of_a_team_counts_as_a_step():
    agent = built(TEAM)
    module, own = ActorCriticModule(), rows(agent)
    both = loss_of(module, agent, own)
    single = built(DISCRETE)
    single.load_state_dict(agent.state_dict())
    parts = [
        loss_of(
            module,
            single,
            Rows(
                {"observation": own.observations["observation"][:, i]},
                {"action": own.actions["action"][:, i]},
                {name: value[:, i] for name, value in own.learned.items()},
            ),
        )
        for i in range(2)
    ]
    torch.testing.assert_close(both, sum(parts) / 2)


def test_a_central_critic_sees_all_and_actors_see_their_own():
    agent = built(TEAM, critic_body=Centralized([8]))
    seen = {"observation": torch.randn(5, 2, 3).double()}
    made, values = agent(seen)
    other = {"observation": seen["observation"].clone()}
    other["observation"][:, 1] += 1
    changed, others = agent(other)
    assert torch.equal(made["action"].logits[:, 0], changed["action"].logits[:, 0])
    assert not torch.equal(values[:, 0], others[:, 0])
    torch.testing.assert_close(values[:, 0], values[:, 1])  # as two rows of a product are
    swapped, _ = agent({"observation": seen["observation"].flip(1)})
    torch.testing.assert_close(swapped["action"].logits.flip(1), made["action"].logits)


def test_agents_may_have_weights_of_their_own():
    agent = built(TEAM, body=PerAgent(MLPBody([8])))
    same = torch.randn(5, 1, 3).double().expand(5, 2, 3)
    made, _ = agent({"observation": same})
    assert not torch.equal(made["action"].logits[:, 0], made["action"].logits[:, 1])
    assert sum(1 for _ in agent.body.parameters()) == 4


def test_a_memory_is_unrolled_as_it_was_acted_and_begins_anew():
    agent = built(DISCRETE, body=GRUBody(hidden=8), share_body=True)
    seen = torch.randn(6, 5, 3).double()  # steps, environments
    begins = torch.zeros(6, 5, dtype=torch.bool)
    begins[3, 2] = True
    state, made = agent.begin(5).double(), []
    first = state
    for step in range(6):
        state = torch.where(begins[step].unsqueeze(-1), torch.zeros_like(state), state)
        distribution, state = agent.act({"observation": seen[step]}, state)
        made.append(distribution["action"].logits)
    together, _ = agent({"observation": seen}, first, begins)
    torch.testing.assert_close(together["action"].logits, torch.stack(made))


@pytest.mark.parametrize(
    ("clips", "places"),
    [
        (Clips(length=2), [0, 2, 5, 7]),
        (Clips(length=2, stride=1), [0, 1, 2, 3, 5, 6, 7, 8]),
        (Clips(length=5), [0, 5]),
    ],
)
def test_clips_begin_where_they_should(clips, places):
    assert clips.places(environments=2, steps=5).tolist() == places


def test_values_of_a_memory_go_on_behind_the_batch():
    """The value after the last step follows the memory of all steps before it."""
    agent = built(DISCRETE, body=GRUBody(hidden=8), share_body=True)
    seen = torch.randn(2, 7, 3).double()
    states, state = [], agent.begin(2).double()
    for step in range(7):
        states.append(state)
        _, state = agent.act({"observation": seen[:, step]}, state)
    whole = agent.values(
        {"observation": seen.transpose(0, 1)}, states[0], torch.zeros(7, 2, dtype=torch.bool)
    )
    flags = torch.zeros(2, 6, dtype=torch.bool)
    batch = TensorDict(
        {
            "steps": TensorDict(
                {
                    "done": flags,
                    "terminated": flags,
                    "agent": {
                        "observations": {"observation": seen[:, :6]},
                        "actions": {"action": torch.zeros(2, 6, dtype=torch.long)},
                        "logprobs": torch.zeros(2, 6).double(),
                        "rewards": torch.zeros(2, 6).double(),
                        "state": torch.stack(states[:6], 1),
                        "begins": flags,
                    },
                },
                [2, 6],
            ),
            "ends": TensorDict(
                {
                    "place": torch.tensor([5, 11]),
                    "agent": {"observations": {"observation": seen[:, 6]}},
                },
                [2],
            ),
        },
        [],
    )
    plain = StepGAE(gamma=1.0, lam=0.0, normalize=False)
    made, _ = rows_of(agent, "agent", handed_out(batch, {"agent": agent.space}), plain)
    torch.testing.assert_close(made.learned["values"].reshape(2, 6), whole[:6].T)
    torch.testing.assert_close(
        made.learned["returns"].reshape(2, 6), whole[1:].T
    )  # no reward, one step


def test_there_may_be_credit_for_what_others_did():
    space = Space(
        {"mask": Observed(()), "observation": Observed((3,))}, {"action": Discrete(4)}, mask="mask"
    )
    agent, nothing = built(space), torch.zeros(1, 2)
    seen = {"observation": torch.zeros(1, 2, 3), "mask": torch.tensor([[True, False]])}
    own = {
        "observations": seen,
        "actions": {"action": nothing.long()},
        "logprobs": nothing,
        "rewards": torch.tensor([[1.0, 3.0]]),
    }
    done = torch.tensor([[False, True]])
    steps = TensorDict({"agent": own, "done": done, "terminated": done}, [1, 2])
    ends = {
        "place": torch.tensor([1]),
        "agent": {"observations": {key: value[:, 1] for key, value in seen.items()}},
    }
    batch = TensorDict({"steps": steps, "ends": TensorDict(ends, [1])}, [])
    batch = handed_out(batch, {"agent": space})
    earned = StepReturn(gamma=1.0, baseline=False)
    for idle, expected in ((False, [0, 0]), (True, [1, -1])):  # of returns 4 and 3
        made, _ = rows_of(agent, "agent", batch, earned, idle)
        assert made.learned["advantages"].sign().tolist() == expected
        assert made.learned["weights"].tolist() == [1, 0]


def test_schedules():
    assert [i for i in range(6) if Periodic(3, first=1).due(i)] == [1, 4]
    turns = [[Alternating(2, turn).due(i) for i in range(6)] for turn in (0, 1)]
    assert turns[0] == [True, True, False, False, True, True]
    assert [not due for due in turns[0]] == turns[1]


def taught_together(**agents):
    module = ActorCriticModule(joint_loss=SimulationLoss())
    module.agents.update(agents)
    module.check_agents()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ActorCriticModule(loss=GSPO()), "loss=GSPO reads the column 'row'"),
        (lambda: ActorCriticModule(epochs=0), "epochs=0 must be >= 1"),
        (lambda: ActorCritic(body=GRUBody()), "set share_body: true"),
        (lambda: ActorCritic(share_body=True, critic_body=MLPBody()), "remove the other"),
        (lambda: ActorCritic(actor_lr=-1), "actor_lr=-1 must be >= 0"),
        (lambda: AdaptiveKL(0), r"AdaptiveKL\(value=0, target=0.01\): both must be > 0"),
        (lambda: Alternating(turn=2), r"turn=2\) must be in \[0, turns=2\)"),
        (lambda: MLPBody([0]), r"hidden\[0\]=0 must be >= 1"),
        (lambda: MLPBody(activation="swish"), "activation='swish' must be one of tanh"),
        (lambda: built(DISCRETE, body=MLPBody(observations=["x"])), "there is no observation 'x'"),
        (lambda: built(DISCRETE, body=PerAgent()), "PerAgent is for groups of agents"),
        (lambda: Clips(length=9).places(2, 8), "a batch has 8 steps of each environment"),
        (
            lambda: taught_together(simulator=ActorCritic()),
            "'adversarial_verifier' does not exist or",
        ),
        (
            lambda: taught_together(
                adversarial_verifier=ActorCritic(), simulator=ActorCritic(schedule=Periodic(2))
            ),
            "'simulator' does not exist or does not learn in every iteration; remove joint_loss",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_other_losses_take_steps_too():
    for loss in (CISPO(), Surrogate(), Reinforce()):
        agent = built(DISCRETE)
        assert loss_of(ActorCriticModule(loss=loss), agent, rows(agent)).isfinite()
    assert not ActorCriticModule(advantage=StepReturn(baseline=False)).advantage.needs_values


@pytest.mark.parametrize(
    "schedule",
    [
        EveryIteration(),
        Periodic(3),
        Periodic(3, first=5),
        Alternating(2, 1, 3),
        Alternating(1, 0, 1),
    ],
)
def test_a_schedule_counts_what_it_would_tell_of_each_iteration(schedule):
    counted = [schedule.count(n) for n in range(20)]
    assert counted == [sum(map(schedule.due, range(n))) for n in range(20)]
    assert schedule.count(10**18) > 10**17  # at once
