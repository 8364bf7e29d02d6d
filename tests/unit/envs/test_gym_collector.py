"""Test GymCollector: what a batch holds, what follows its steps, and how a run goes on."""

import pytest
import torch

from lightning_rl.envs import EnvDataModule, EnvError, EnvMaker, GRUBody, Gym, TorchRLEnv
from lightning_rl.envs.collectors import collector_of
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.networks.actor_critic import joint_log_prob
from lightning_rl.errors import ConfigError
from lightning_rl.run.loop.threads import hanging_threads
from tests.support import worlds  # registers the environments
from tests.support.env_agents import agent_for, collected

WALK = f"{worlds.__name__}:Walk-v0"


def collector(name="Walk", envs=3, seed=0, limit=None, seconds=60.0, first=0, **arguments):
    made = GymCollector(Gym(f"tests.support.worlds:{name}-v0", arguments), limit, seconds)
    made.start(seed, first, envs)
    return made


def same(one, other):
    return all((one[key] == other[key]).all() for key in one.keys(True, True))


def test_a_batch_holds_what_happened():
    made = collector()
    batch = made.collect(agent_for(made), 0, 40)
    steps, ends = batch["steps"], batch["ends"]
    own = steps[AGENT]
    assert tuple(steps.batch_size) == (3, 40)
    places, actions = own["observations", "observation"], own["actions", "action"]
    moves = torch.where(actions == 1, 1.0, -1.0)
    goes_on = ~steps["done"][:, :-1]
    # The next row is what the step led to, unless another episode begins there.
    assert (places[:, 1:, 0][goes_on] == (places[..., 0] + moves)[:, :-1][goes_on]).all()
    assert (places[:, 1:, 1][goes_on] == places[:, :-1, 0][goes_on]).all()
    assert (own["rewards"] == 5.0 * steps["terminated"] - 1.0).all()
    assert (steps["terminated"] == (places[..., 0] + moves >= 5)).all()
    cut = steps["done"] & ~steps["terminated"]
    assert cut.any()
    # No step of the same episode follows ends, cuts, and the last of each environment.
    expected = steps["done"].clone()
    expected[:, -1] = True
    assert sorted(ends["place"].tolist()) == expected.flatten().nonzero().squeeze(1).tolist()
    led_to = (places[..., 0] + moves).flatten()[ends["place"]]
    assert (ends[AGENT, "observations", "observation"][:, 0] == led_to).all()


def test_logprobs_are_the_agents_own():
    made = collector()
    agents = agent_for(made)
    own = made.collect(agents, 0, 20)["steps", AGENT]
    distributions, _ = agents[AGENT](own["observations"])
    torch.testing.assert_close(joint_log_prob(distributions, own["actions"]), own["logprobs"])


def test_finished_episodes_are_told():
    made = collector(envs=2)
    batch = made.collect(agent_for(made), 0, 50)
    done = batch["steps", "done"]
    assert len(made.finished) == int(done.sum())
    first = next(e for e in made.finished)
    env = int(done.any(1).nonzero()[0])
    lengths = [int(done[e].nonzero()[0]) + 1 for e in range(2) if done[e].any()]
    assert first.length in lengths
    assert env in (0, 1)
    rewards = batch["steps", AGENT, "rewards"]
    assert {first.reward} <= {float(rewards[e, :n].sum()) for e, n in enumerate(lengths)}


def test_the_same_seed_plays_the_same_and_each_iteration_draws_anew():
    batches = []
    for seed in (0, 0, 1):
        made = collector(seed=seed)
        agents = agent_for(made)
        batches.append([made.collect(agents, i, 10) for i in range(2)])
    assert same(batches[0][0], batches[1][0])
    assert same(batches[0][1], batches[1][1])
    assert not same(batches[0][0], batches[2][0])
    again = collector()
    agents = agent_for(again)
    assert not same(again.collect(agents, 5, 10)["steps"], batches[0][0]["steps"])


def test_environments_are_the_same_however_they_are_dealt_to_ranks():
    together = collector(envs=4)
    seeds = [p.begin(0).row.tolist() for p in together._seats]
    apart = [collector(envs=2, first=first) for first in (0, 2)]
    assert [p.begin(0).row.tolist() for c in apart for p in c._seats] == seeds


@pytest.mark.parametrize("body", [None, "memory"])
def test_a_run_goes_on_in_the_middle_of_episodes(body):
    options = {"body": GRUBody(hidden=8), "share_body": True} if body else {}
    whole = collector()
    agents = agent_for(whole, **options)
    whole.collect(agents, 0, 11)
    state = whole.state_dict()
    expected = whole.collect(agents, 1, 11)
    other = collector()
    other.load_state_dict(torch.load(saved(state), weights_only=True))
    assert len(other.state_dict()["episodes"]) == 3  # before anything was played
    found = other.collect(agents, 1, 11)
    assert same(found["steps"], expected["steps"])
    assert same(found["ends"], expected["ends"])
    assert [e.reward for e in other.finished] == [e.reward for e in whole.finished]


def saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_an_episode_is_cut_where_it_is_asked_to_be():
    made = collector(limit=3)
    batch = made.collect(agent_for(made), 0, 30)
    assert max(e.length for e in made.finished) == 3
    assert batch["steps", "done"][:, :3].any(1).all()


def test_evaluations_are_always_of_the_same_episodes_and_leave_the_batch_alone():
    made, other = collector(), collector()
    agents = agent_for(made)
    first = made.play(agents, [5, 6, 7], greedy=True)
    assert len(first) == 3
    assert same(made.collect(agents, 0, 10), other.collect(agents, 0, 10))
    again = made.play(agents, [5, 6, 7], greedy=True)
    assert [(e.reward, e.length) for e in first] == [(e.reward, e.length) for e in again]
    alone = [made.play(agents, [seed], greedy=True)[0] for seed in (5, 6, 7)]
    assert [(e.reward, e.length) for e in first] == [(e.reward, e.length) for e in alone]


def test_all_kinds_of_spaces_are_played():
    for kind, size in (("several", 2), ("binary", 2)):
        made = collector("Switches", actions=kind)
        batch = made.collect(agent_for(made), 0, 4)
        own = batch["steps", AGENT]
        assert own["observations", "level"].shape == (3, 4, 2, 2)
        assert own["observations", "level"].dtype == torch.uint8
        assert own["actions", "action"].shape == (3, 4, size)
    made = collector("Reach")
    batch = made.collect(agent_for(made), 0, 4)
    assert batch["steps", AGENT, "actions", "action"].shape == (3, 4, 2)
    assert batch["steps", "terminated"].all()
    assert batch["ends", "place"].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "raises",
            r"environment 0 in step 3 of its episode 0, seed \d+ raised ValueError: the",
        ),
        ("nan", r"environment \d gave \[nan, 0.0\] as observation at step 3 of the batch"),
        ("hangs", r"a step took longer than max_step_seconds=0.2.*environment 0 in step 3 of its"),
    ],
)
def test_what_goes_wrong_says_where(how, words):
    worlds.released.clear()
    made = collector("Faulty", how=how, seconds=0.2)
    with pytest.raises(EnvError, match=words):
        collected(made, agent_for(made), 0, 10)
    worlds.released.set()
    for thread in hanging_threads():  # it draws from the generator that other tests seed
        thread.join(60)


def test_an_environment_that_forgets_is_found_out_when_a_run_goes_on():
    made = collector("Faulty", envs=8, how="forgets")
    agents = agent_for(made)
    made.collect(agents, 0, 20)
    state = made.state_dict()
    other = collector("Faulty", envs=8, how="forgets")
    other.load_state_dict(state)
    with pytest.raises(EnvError, match="is not deterministic, so the run cannot be resumed"):
        other.collect(agents, 1, 20)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gym("NoSuchEnv-v0").made(), r"gymnasium cannot make 'NoSuchEnv-v0'"),
        (lambda: Gym("CartPole-v1", {"wrong": 1}).made(), r"cannot make 'CartPole-v1'.*wrong"),
        (
            lambda: Gym("CartPole-v1", wrappers=["gymnasium.wrappers.NoWrapper"]).made(),
            r"data.env.wrappers\[0\]: 'gymnasium.wrappers.NoWrapper': .* has no 'NoWrapper'",
        ),
        (
            lambda: Gym(
                "CartPole-v1",
                wrappers=[{"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max": 3}}],
            ).made(),
            r"data.env.wrappers\[0\]: gymnasium.wrappers.TimeLimit",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    "env",
    [
        Gym(WALK),
        TorchRLEnv(
            "torchrl.envs.GymEnv", {"env_name": "CartPole-v1", "categorical_action_encoding": True}
        ),
    ],
    ids=["gym", "torchrl"],
)
def test_a_greedy_collector_takes_the_best_action(env):
    data = EnvDataModule(env, num_envs=2, frames_per_iteration=40, greedy=True)
    made = data.collector
    made.start(0, 0, 2)
    agents = agent_for(made)
    own = made.collect(agents, 0, 20)["steps", AGENT]
    distributions, _ = agents[AGENT](own["observations"])
    assert (own["actions", "action"] == distributions["action"].mode()).all()
    drawn = distributions["action"].log_prob(own["actions", "action"])
    torch.testing.assert_close(own["logprobs"], drawn, rtol=1e-5, atol=1e-6)
    made.close()


class OwnGym(Gym):
    """A kind of environment derived from gymnasium's."""


class Foreign(EnvMaker):
    """A kind of environment that nobody collects from."""

    name = "Foreign-v0"


def test_a_kind_of_environment_has_the_collector_of_its_base():
    assert type(collector_of(OwnGym(WALK), None, 60.0)) is GymCollector
    with pytest.raises(ConfigError, match=r"no collector for Foreign; set data.collector"):
        EnvDataModule(Foreign())
