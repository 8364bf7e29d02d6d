"""Test PooledGym: environments in processes, each at its own pace."""

import pytest
import torch

from lightning_rl.envs import GRUBody, Gym, PooledGym
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.maker import AGENT
from lightning_rl.errors import ConfigError
from tests.support.env_agents import agent_for

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(started):
    """Starts collectors of pools of two processes."""

    def start(**options):
        return started(PooledGym("tests.support.worlds:Walk-v0", workers=2, **options))

    return start


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


def test_in_step_it_is_the_plain_collector_and_goes_on(pool):
    plain = GymCollector(Gym("tests.support.worlds:Walk-v0"), None, 60.0)
    plain.start(0, 0, 5)
    together = pool(force_sync=True)
    assert together.exact == ""
    agents = agent_for(plain, body=GRUBody(hidden=8), share_body=True)
    for iteration in range(2):
        expected, found = (c.collect(agents, iteration, 11) for c in (plain, together))
        assert same(found["steps"], expected["steps"])
        assert same(found["ends"], expected["ends"])
    state = together.state_dict()
    expected = together.collect(agents, 2, 11)
    other = pool(force_sync=True)
    other.load_state_dict(state)
    assert same(other.collect(agents, 2, 11)["steps"], expected["steps"])


def test_an_environment_may_write_the_next_observation_over_the_last(started):
    plain = GymCollector(Gym("tests.support.worlds:Walk-v0"), None, 60.0)
    plain.start(0, 0, 5)
    pooled = started(PooledGym("tests.support.worlds:Reused-v0", workers=2, force_sync=True))
    expected, found = (c.collect(agent_for(plain), 0, 30) for c in (plain, pooled))
    assert expected["steps", "done"].any()
    assert same(found["ends"], expected["ends"])


def test_each_goes_at_its_own_pace_and_as_many_are_served_as_is_said(pool):
    made = pool(min_batch=2, max_batch=3, max_wait=5.0)
    assert "depends on timing" in made.exact
    agents, served = agent_for(made), []
    act = agents[AGENT].act
    agents[AGENT].act = lambda seen, state=None: (
        served.append(len(seen["observation"])),
        act(seen),
    )[1]
    batch = made.collect(agents, 0, 30)
    assert max(served) <= 3
    assert min(served) >= 1
    assert served.count(1) <= 30  # of the last one that has steps to go
    own = batch["steps", AGENT]
    places, actions = own["observations", "observation"][..., 0], own["actions", "action"]
    led_to = places + torch.where(actions == 1, 1.0, -1.0)
    goes_on = ~batch["steps", "done"][:, :-1]
    assert (places[:, 1:][goes_on] == led_to[:, :-1][goes_on]).all()
    distributions, _ = agents[AGENT](own["observations"])
    torch.testing.assert_close(
        distributions["action"].log_prob(actions), own["logprobs"], rtol=1e-5, atol=1e-6
    )
    assert len(made.finished) == int(batch["steps", "done"].sum())


def test_bounds_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="max_batch=2 must be >= min_batch=3"):
        PooledGym("Walk-v0", min_batch=3, max_batch=2)
