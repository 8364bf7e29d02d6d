"""GymWorkers: environments in processes with agents of their own."""

import copy

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl import FixedSchedule
from lightning_rl.envs import ActorCriticModule, EnvDataModule, GRUBody, Gym, GymWorkers
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.maker import AGENT
from lightning_rl.errors import ConfigError
from lightning_rl.extend import CollectorSchedule, TrainerSchedule
from tests.support.env_agents import agent_for
from tests.support.small_run import trainer_of

pytestmark = pytest.mark.slow

WALK = "tests.support.worlds:Walk-v0"


def learn(agents):
    """Change all weights."""
    with torch.no_grad():
        for weight in agents[AGENT].parameters():
            weight.add_(0.1 * torch.randn_like(weight))


def require_same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


def test_each_process_plays_what_a_rank_of_as_many_would(started):
    ranks = [GymCollector(Gym(WALK), None, 60.0) for _ in range(2)]
    for rank, first, count in zip(ranks, (0, 3), (3, 2), strict=True):
        rank.start(0, first, count)
    made = started(GymWorkers(WALK, workers=2))
    agents = agent_for(made, body=GRUBody(hidden=8), share_body=True)
    for iteration in range(3):
        # What is sent is a copy, of the agents as they were then.
        apart = [rank.collect(copy.deepcopy(agents), iteration, 11) for rank in ranks]
        found = made.collect(agents, iteration, 11)
        require_same(found["steps"], torch.cat([batch["steps"] for batch in apart]))
        apart[1]["ends", "place"] += 3 * 11
        require_same(found["ends"], torch.cat([batch["ends"] for batch in apart]))
        assert made.carried == [steps for rank in ranks for steps in rank.carried]
        expected = [e for rank in ranks for e in rank.finished]
        assert list(made.finished) == expected
        assert made.metrics["rollout/version"] == iteration
        assert made.metrics["rollout/staleness_max"] == 0
        learn(agents)


class Noted(Callback):
    """What each iteration recorded, and when agents were sent."""

    def __init__(self):
        self.rows, self.begun, self.synced = [], 0, []

    def on_sync_start(self, trainer, pl_module):
        self.begun += 1

    def on_weights_synced(self, trainer, pl_module, version):
        assert self.begun == len(self.synced) + 1
        assert version == pl_module.iteration
        self.synced.append(version)

    def on_iteration_end(self, trainer, pl_module, metrics):
        self.rows.append(metrics)


def fit(tmp_path, sync, max_staleness, force_sync=True):
    env = GymWorkers(WALK, workers=1, sync=sync, max_staleness=max_staleness, force_sync=force_sync)
    data = EnvDataModule(env, 2, 42, iterations_per_epoch=6, eval_episodes=0, seed=1)
    torch.manual_seed(0)
    noted, module = Noted(), ActorCriticModule(seed=1)
    trainer_of(tmp_path, [noted], logger=False).fit(module, data)
    rows = [row for row in noted.rows if "rollout/version" in row]
    return rows, noted.synced


@pytest.mark.parametrize(
    ("sync", "max_staleness", "force_sync", "versions"),
    [
        (FixedSchedule(2), 2, False, [0, 0, 0, 2, 2, 4]),
        (CollectorSchedule(), 1, True, [0, 0, 2, 2, 4, 4]),
        (TrainerSchedule(3), 3, False, [0, 0, 0, 0, 3, 3]),
    ],
)
def test_schedules_say_who_plays(tmp_path, sync, max_staleness, force_sync, versions):
    rows, synced = fit(tmp_path, sync, max_staleness, force_sync)
    assert [row["rollout/version"] for row in rows] == versions
    ages = [i - version for i, version in enumerate(versions)]
    assert [row["rollout/staleness_max"] for row in rows] == ages
    assert synced == [row["sync/version"] for row in rows if "sync/version" in row]
    assert synced == sorted(set(versions))


def test_settings_that_contradict_each_other_are_refused():
    words = r"leaves agents up to 1 iterations behind, but max_staleness=0; raise max_staleness to"
    with pytest.raises(ConfigError, match=words):
        GymWorkers(WALK, force_sync=False)
    with pytest.raises(ConfigError, match=words):
        GymWorkers(WALK, sync=FixedSchedule(2))
