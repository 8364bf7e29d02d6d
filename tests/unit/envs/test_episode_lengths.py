"""Episodes that are too short to learn from: which steps they are, and that they teach nothing."""

import pytest
import torch

from lightning_rl.envs import (
    ActorCritic,
    ActorCriticModule,
    EnvDataModule,
    Gym,
    OffPolicyModule,
    TorchRLEnv,
)
from lightning_rl.envs.batches import handed_out, too_short
from lightning_rl.envs.collectors import collector_of
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.rows import rows_of
from lightning_rl.errors import ConfigError
from tests.support import worlds  # registers the environments
from tests.support.small_run import Rows, trainer_of

WALK = Gym(f"{worlds.__name__}:Walk-v0")
"""Episodes of 3 to 8 steps; with 8 they are cut."""


def flags(row):
    return torch.tensor([letter == "x" for letter in row])


@pytest.mark.parametrize(
    ("done", "carried", "least", "expected"),
    [
        ("..x.x...", 0, 3, "...xx..."),  # of 3 steps, of 2, and one that goes on
        ("..x.x...", 0, 4, "xxxxx..."),
        ("..x.x...", 1, 4, "...xx..."),  # a step of the first was in the batch before
        ("xx.....x", 0, 2, "xx......"),
        ("x......x", 5, 7, "x......."),
        ("........", 0, 9, "........"),
    ],
)
def test_which_steps_are_of_short_episodes(done, carried, least, expected):
    other = "x......x"  # beside it, of another environment
    both = torch.stack([flags(done), flags(other)])
    found = too_short(both, [carried, 10], least)
    assert torch.equal(found[0], flags(expected))
    assert found[1].tolist() == [False] + [least > 7] * 7


def batch_of(env, least, envs=4, steps=40):
    """Return a batch as the data module marks it, its agent, and the episodes that ended."""
    made = collector_of(env, None, 60.0)
    made.start(0, 0, envs)
    torch.manual_seed(0)
    agent = ActorCritic()
    agent.build(made.agents[AGENT])
    made.collect({AGENT: agent}, 0, 3)  # so that episodes are at hand
    batch = made.collect({AGENT: agent}, 1, steps)
    done = batch["steps", "done"]
    batch["steps"]["skipped"] = too_short(done, made.carried or [0] * envs, least)
    episodes = made.finished
    made.close()
    return handed_out(batch, made.agents), agent, episodes


@pytest.mark.parametrize(
    ("env", "least"),
    [
        (WALK, 8),
        (
            TorchRLEnv(
                "torchrl.envs.GymEnv",
                {"env_name": "CartPole-v1", "categorical_action_encoding": True},
            ),
            20,
        ),
    ],
)
def test_what_is_skipped_teaches_nothing(env, least):
    batch, agent, episodes = batch_of(env, least)
    skipped, done = batch["skipped"], batch["next", "done"].squeeze(-1)
    lengths = sorted(e.length for e in episodes if e.length < least)
    assert int((skipped & done).sum()) == len(lengths)
    assert 0 < int(skipped.sum()) < skipped.numel()
    module = ActorCriticModule()
    module.agents[AGENT] = agent

    def gradient():
        rows, _ = rows_of(agent, AGENT, batch, module.advantage)
        assert rows.partial
        every = torch.arange(skipped.numel())
        drawn = rows.teaching(every)
        assert drawn.tolist() == (~skipped).flatten().nonzero().squeeze(1).tolist()
        agent.zero_grad()
        own = rows.at(drawn)
        made, values = agent(own.observations, own.state, own.begins)
        loss, _ = module._loss(made, values, own, {}, drawn)
        loss.backward()
        return [p.grad.clone() for p in agent.parameters()]

    before = gradient()
    batch["next", "reward"][skipped] = 1e3
    for one, other in zip(before, gradient(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert any(bool(g.any()) for g in before)


def trained(module, env, tmp_path, least):
    data = EnvDataModule(
        env,
        num_envs=2,
        frames_per_iteration=64,
        iterations_per_epoch=2,
        min_episode_length=least,
        eval_episodes=0,
        seed=3,
    )
    rows = Rows()
    torch.manual_seed(0)
    trainer_of(tmp_path, [rows], logger=False).fit(module, data)
    return [row["rollout/skipped_share"] for row in rows.rows]


REACH = Gym(f"{worlds.__name__}:Reach-v0")
"""Episodes of one step."""


def test_where_all_are_too_short_nothing_is_learned(tmp_path):
    module = ActorCriticModule(seed=1)
    assert trained(module, REACH, tmp_path, 2) == [1.0, 1.0]
    assert module.iteration == 2
    assert not module.optimizers().optimizer.state  # it has made no step
    off_policy = OffPolicyModule(warmup_frames=0, batch_size=4, updates_per_iteration=1, seed=1)
    trained(off_policy, REACH, tmp_path, 2)
    assert (len(off_policy.buffer), int(off_policy.updates)) == (0, 0)


def test_a_buffer_gets_none_of_them(tmp_path):
    module = OffPolicyModule(warmup_frames=0, batch_size=4, updates_per_iteration=1, seed=1)
    shares = trained(module, WALK, tmp_path, 8)
    assert sum(shares) > 0
    assert module.buffer.added == round(128 - 64 * sum(shares))


def test_lengths_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="max_episode_length=4 must be >= min_episode_length=5"):
        EnvDataModule(WALK, min_episode_length=5, max_episode_length=4)
