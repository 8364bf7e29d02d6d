"""ReplayBuffer and its samplers: what is stored, evicted and drawn, by hand and after a resume."""

import json

import numpy as np
import pytest
import torch

from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.losses import SFTMix
from lightning_rl.callbacks import RunReport, WeightSync
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.samplers import (
    FIFO,
    AdvantagePriority,
    BufferEntry,
    Mixed,
    RewardPriority,
    Uniform,
)
from lightning_rl.data.curriculum import PassRateCurriculum
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.rollouts.store import RolloutStore
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import RolloutStatus
from tests.support.grouped import grouped
from tests.support.small_run import share_of_sevens, trainer_of


@pytest.fixture
def make_group(make_rollout):
    """Make a group of two, named by its iteration and place; both tokens of its version."""

    def make(iteration, place, rewards=(0.0, 1.0), version=None):
        versions = [iteration if version is None else version] * 2
        return [
            make_rollout(
                [4],
                [6, 1],
                group_id=f"{iteration}/{place}/p",
                sample_index=i,
                reward=reward,
                versions=versions,
                logprobs=[-0.25, -1.5],
            )
            for i, reward in enumerate(rewards)
        ]

    return make


@pytest.fixture
def buffer(tmp_path):
    def make(**options) -> ReplayBuffer:
        return ReplayBuffer(str(tmp_path / "buffer.sqlite"), **({"seed": 3} | options))

    return make


def names(groups) -> list[str]:
    return [group[0].group_id for group in groups]


def states(path) -> dict[str, str]:
    rows = RolloutStore(path).connection.execute("SELECT DISTINCT group_id, state FROM rollouts")
    return {row["group_id"].removesuffix("/p"): row["state"] for row in rows}


# ---------------------------------------------------------------- storing and evicting


def test_replayed_groups_follow_the_fresh_ones_and_are_what_was_stored(buffer, make_group):
    replay = buffer(sampler=Uniform(groups=5))
    first = [make_group(0, place) for place in range(3)]
    assert replay.exchange(first, version=0) == first  # nothing older is there
    assert replay.metrics == {
        "buffer/size": 3.0, "buffer/replayed_share": 0.0, "buffer/evicted": 0.0,
        "buffer/expired": 0.0, "rollout/archived": 0.0,
    }  # fmt: skip
    second = [make_group(1, place) for place in range(2)]
    batch = replay.exchange(second, version=1)
    # Five are asked for, three are there. They keep their versions and logprobs.
    assert batch == second + first
    assert replay.metrics["buffer/size"] == 5.0
    assert replay.metrics["buffer/replayed_share"] == 3 / 5
    assert replay.metrics["buffer/staleness_mean"] == 1.0


class Newest(Uniform):
    """The newest groups, with a metric of its own."""

    offered = 0

    def choose(self, entries, count, random):
        self.offered = len(entries)
        return list(entries[-count:])

    def metrics(self):
        return {"offered": float(self.offered)}


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: Mixed(replayed=0.5, pick=own)])
def test_a_sampler_records_metrics_of_its_own(buffer, make_group, wrap):
    replay = buffer(sampler=wrap(Newest(groups=1)))
    replay.exchange([make_group(0, place) for place in range(3)], version=0)
    assert replay.metrics["sample/offered"] == 0.0
    replay.exchange([make_group(1, 0)], version=1)
    assert replay.metrics["sample/offered"] == 3.0


def test_the_oldest_beyond_the_capacity_are_archived(buffer, make_group, tmp_path):
    replay = buffer(capacity=3, sampler=Uniform(groups=9))
    replay.exchange([make_group(0, 0), make_group(0, 1)], version=0)
    batch = replay.exchange([make_group(1, 0), make_group(1, 1)], version=1)
    assert names(batch) == ["1/0/p", "1/1/p", "0/1/p"]
    assert replay.metrics["buffer/size"] == 3.0
    assert (replay.metrics["buffer/evicted"], replay.metrics["buffer/expired"]) == (1.0, 0.0)
    assert replay.metrics["rollout/archived"] == len(make_group(0, 0)) > 1  # groups and rollouts
    assert states(tmp_path / "buffer.sqlite") == {
        "0/0": "archived", "0/1": "kept", "1/0": "kept", "1/1": "kept"
    }  # fmt: skip


def test_no_replayed_token_is_staler_than_allowed(buffer, make_group, tmp_path):
    replay = buffer(max_staleness=2, sampler=Uniform(groups=9))
    replay.exchange([make_group(1, 0), make_group(1, 1, version=0)], version=1)
    assert names(replay.exchange([make_group(2, 0)], version=2)) == ["2/0/p", "1/0/p", "1/1/p"]
    assert replay.metrics["buffer/staleness_mean"] == 1.5  # 2 - 1 and 2 - 0
    assert replay.metrics["buffer/staleness_max"] == 2.0
    assert names(replay.exchange([make_group(3, 0)], version=3)) == ["3/0/p", "1/0/p", "2/0/p"]
    assert (replay.metrics["buffer/evicted"], replay.metrics["buffer/expired"]) == (1.0, 1.0)
    assert names(replay.exchange([make_group(4, 0)], version=4)) == ["4/0/p", "2/0/p", "3/0/p"]
    assert states(tmp_path / "buffer.sqlite")["1/1"] == "expired"


def test_a_group_without_a_graded_rollout_is_stored_but_not_replayed(buffer, make_group, tmp_path):
    replay = buffer()
    failed = make_group(0, 0, rewards=(None, None))
    for rollout in failed:
        rollout.status = RolloutStatus.FAILED
    assert replay.exchange([failed], version=0) == [failed]
    assert replay.exchange([make_group(1, 0)], version=1) == [make_group(1, 0)]
    assert states(tmp_path / "buffer.sqlite") == {"0/0": "kept", "1/0": "kept"}


def test_a_second_run_in_the_same_file_sees_only_its_own_groups(buffer, make_group, tmp_path):
    buffer().exchange([make_group(0, 0, rewards=(0.0, 0.5))], version=0)
    second = buffer()
    assert second.exchange([make_group(0, 0)], version=0) == [make_group(0, 0)]
    assert second.exchange([make_group(1, 0)], version=1)[1:] == [make_group(0, 0)]
    # Both are there for offline training: three groups, though two share a name.
    groups = RolloutStore(tmp_path / "buffer.sqlite").groups()
    assert [[r.reward for r in group] for group in groups] == [[0.0, 0.5], [0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize("options", [{"capacity": 0}, {"max_staleness": 0}])
def test_impossible_bounds_are_refused(buffer, options):
    with pytest.raises(ConfigError, match=r"=0 must be >= 1"):
        buffer(**options)


# ---------------------------------------------------------------- resume

SAMPLERS = [FIFO(2), Uniform(2), RewardPriority(2), AdvantagePriority(2), Mixed(0.4)]


@pytest.mark.parametrize("index", range(len(SAMPLERS)), ids=lambda i: type(SAMPLERS[i]).__name__)
def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(
    tmp_path, make_group, monkeypatch, index
):
    def make(name):
        sampler = [FIFO(2), Uniform(2), RewardPriority(2), AdvantagePriority(2), Mixed(0.4)][index]
        return ReplayBuffer(
            str(tmp_path / name), capacity=7, max_staleness=4, sampler=sampler, seed=3
        )

    def step(replay, iteration):
        # Spread and mean differ; every fifth group is written by a policy that is older.
        fresh = [
            make_group(
                iteration, place, rewards=(0.0, (iteration * 3 + place) % 4 / 4),
                version=iteration - (iteration + place) % 5 // 4 * 3,
            )
            for place in range(3)
        ]  # fmt: skip
        return names(replay.exchange(fresh, iteration)), replay.metrics

    whole = make("whole.sqlite")
    expected = [step(whole, iteration) for iteration in range(8)]
    for stopped in (1, 5):
        first = make(f"{stopped}.sqlite")
        assert [step(first, i) for i in range(stopped)] == expected[:stopped]
        state = json.loads(json.dumps(first.state_dict()))
        for iteration in range(stopped, stopped + 2):  # lost with the crash
            step(first, iteration)
        first.close()
        second = make(f"{stopped}.sqlite")
        second.load_state_dict(state)
        assert [step(second, i) for i in range(stopped, 8)] == expected[stopped:]
        kept = {n for n, s in states(tmp_path / f"{stopped}.sqlite").items() if s == "kept"}
        assert kept == {n for n, s in states(tmp_path / "whole.sqlite").items() if s == "kept"}
        # A data set has each group once, though two iterations were collected twice.
        groups = names(RolloutStore(tmp_path / f"{stopped}.sqlite").groups())
        assert sorted(groups) == sorted(names(RolloutStore(tmp_path / "whole.sqlite").groups()))


def test_resuming_with_another_file_is_refused(tmp_path, buffer, make_group):
    replay = buffer()
    replay.exchange([make_group(0, 0), make_group(0, 1)], version=0)
    other = ReplayBuffer(str(tmp_path / "other.sqlite"))
    with pytest.raises(ConfigError, match=r"other\.sqlite lacks 2 of the 2 groups"):
        other.load_state_dict(replay.state_dict())


def test_a_checkpoint_before_the_first_batch_is_fine(buffer, make_group):
    state = buffer().state_dict()
    replay = buffer()
    replay.load_state_dict(json.loads(json.dumps(state)))
    assert replay.exchange([make_group(0, 0)], version=0) == [make_group(0, 0)]


# ---------------------------------------------------------------- samplers

ENTRIES = [
    # place, oldest version, mean reward, mean |r - mean|
    BufferEntry(1, 0, 0.00, 0.0),
    BufferEntry(2, 0, 0.25, 0.1),
    BufferEntry(3, 0, 0.50, 0.3),
    BufferEntry(4, 0, 1.00, 0.0),
]


def shares(sampler, draws=4000) -> list[float]:
    """Return how often each entry is drawn when one is."""
    random = np.random.default_rng(0)
    places = [sampler.choose(ENTRIES, 1, random)[0].place for _ in range(draws)]
    return [places.count(entry.place) / draws for entry in ENTRIES]


def close(*expected):
    return pytest.approx(expected, abs=0.03)  # four standard errors of 4000 draws


def test_shares_of_each_strategy():
    assert shares(Uniform()) == close(0.25, 0.25, 0.25, 0.25)
    # exp(r / 0.25): 1, e, e^2 and e^4, which sum to 65.7.
    assert shares(RewardPriority(temperature=0.25)) == close(0.015, 0.041, 0.112, 0.831)
    assert shares(AdvantagePriority(alpha=1.0)) == close(0, 0.25, 0.75, 0)
    # 0.1^2 : 0.3^2 = 1 : 9; and with alpha=0 all that have a spread alike.
    assert shares(AdvantagePriority(alpha=2.0)) == close(0, 0.1, 0.9, 0)
    assert shares(AdvantagePriority(alpha=0.0)) == close(0, 0.5, 0.5, 0)


@pytest.mark.parametrize("sampler", [Uniform(), RewardPriority(), AdvantagePriority(), FIFO()])
def test_no_entry_is_drawn_twice_and_they_stay_in_order(sampler):
    random = np.random.default_rng(1)
    for count in range(6):
        places = [entry.place for entry in sampler.choose(ENTRIES, count, random)]
        assert places == sorted(set(places))
        assert len(places) <= count
    assert sampler.choose([], 3, random) == []


def test_uniform_draws_all_when_as_many_are_asked_for():
    assert Uniform().choose(ENTRIES, 9, np.random.default_rng(0)) == ENTRIES


def test_fifo_takes_each_once_in_order_of_arrival():
    sampler, random = FIFO(), np.random.default_rng(0)
    drawn = [[e.place for e in sampler.choose(ENTRIES, 3, random)] for _ in range(3)]
    assert drawn == [[1, 2, 3], [4], []]


def test_the_priority_of_a_group_is_its_mean_absolute_advantage(buffer, make_group):
    replay = buffer()
    replay.exchange([make_group(0, 0, rewards=(0.0, 1.0, 0.5, 0.5))], version=0)
    # The mean is 0.5, the deviations 0.5, 0.5, 0 and 0.
    assert [(e.reward, e.spread) for e in replay.entries] == [(0.5, 0.25)]


def test_mixed_keeps_the_shares_and_marks_experts(buffer, make_group, tmp_path):
    experts = tmp_path / "experts.jsonl"
    open_rollouts(experts).append(
        [r for place in range(9) for r in make_group(0, place, rewards=(0.0, 1.0))], 0
    )
    sampler = Mixed(
        replayed=0.25, demonstration=0.25, demonstration_path=str(experts), demonstration_reward=1.0
    )
    assert sampler.gives_demonstrations
    replay = buffer(sampler=sampler)
    replay.exchange([make_group(0, place) for place in range(8)], version=0)
    fresh = [make_group(1, place) for place in range(8)]
    batch = replay.exchange(fresh, version=1)
    # 8 fresh are one half, so 4 replayed and 4 experts are a quarter each.
    assert len(batch) == 16
    assert batch[:8] == fresh
    assert all(name.startswith("0/") for name in names(batch[8:12]))
    imitated = batch[12:]
    assert len({group[0].group_id for group in imitated}) == 4
    for (rollout,) in imitated:
        assert (rollout.demonstration, rollout.reward, rollout.versions) == (True, 1.0, [-1, -1])
    assert replay.metrics["buffer/replayed_share"] == 4 / 16


def test_mixed_refuses_what_cannot_be(tmp_path, make_group):
    with pytest.raises(ConfigError, match="sum to less than 1"):
        Mixed(replayed=0.5, demonstration=0.5, demonstration_path="x.jsonl")
    with pytest.raises(ConfigError, match="set both, or neither"):
        Mixed(demonstration=0.1)
    path = tmp_path / "experts.jsonl"
    open_rollouts(path).append(make_group(0, 0), 0)
    sampler = Mixed(0.0, 0.5, str(path), demonstration_reward=2.0)
    with pytest.raises(DataError, match=r"no completed rollout has a reward of at least 2\.0"):
        sampler.demonstrations(4, np.random.default_rng(0))


# ---------------------------------------------------------------- in a run


def replaying_run(tiny_model, tmp_path, model=None, sampler=None):
    rows = [{"prompt": f"{n}="} for n in range(100, 116)]
    buffer = ReplayBuffer(
        str(tmp_path / "run.sqlite"), capacity=6, max_staleness=2, sampler=sampler or Uniform(2)
    )
    data = RLDataModule(
        PassRateCurriculum(IterablePrompts(rows), success_reward=0.4),
        [share_of_sevens],
        TransformersEngine(device="cpu"),
        buffer=buffer,
        sampling=Sampling(max_tokens=4),
        group_size=4,
        groups_per_iteration=3,
        iterations_per_epoch=3,
    )
    module = PolicyModule(
        str(tiny_model),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0),
        **grouped(**(model or {"correction": TokenTIS(), "minibatches": 2})),
    )
    report = RunReport()
    trainer = trainer_of(tmp_path, [WeightSync(), report], logger=False, max_epochs=2)
    trainer.fit(module, data)
    return report.history, data


def test_a_run_trains_on_older_groups_beside_fresh_ones(tiny_model, tmp_path):
    history, data = replaying_run(tiny_model, tmp_path)
    rows = {row["iteration"]: row for row in history if "buffer/size" in row}
    # Three fresh groups each; from the second iteration on two older ones beside them.
    assert [rows[i]["buffer/size"] for i in range(1, 7)] == [3, 6, 6, 6, 6, 6]
    assert [rows[i]["buffer/replayed_share"] for i in range(1, 7)] == [0.0] + [0.4] * 5
    assert max(rows[i].get("buffer/staleness_max", 0.0) for i in rows) in (1.0, 2.0)
    # What is replayed was sampled by an older policy, and the correction sees that.
    assert rows[1]["correction/weight_max"] == pytest.approx(1.0, abs=1e-3)
    assert rows[6]["correction/weight_max"] > 1.001
    assert (data.train_prompts.pass_rates != 0.5).any()
    assert len(RolloutStore(tmp_path / "run.sqlite").groups()) == 18


def test_experts_need_a_loss_that_imitates(tiny_model, tmp_path, make_group):
    experts = tmp_path / "experts.jsonl"
    open_rollouts(experts).append(make_group(0, 0), 0)
    sampler = Mixed(0.25, 0.25, str(experts))
    with pytest.raises(ConfigError, match=r"needs model\.loss=SFTMix, not PPOClip"):
        replaying_run(tiny_model, tmp_path, sampler=sampler)
    model = {"loss": SFTMix(), "correction": TokenTIS()}
    history = replaying_run(tiny_model, tmp_path, sampler=sampler, model=model)[0]
    # 3 x 0.25 / 0.5 = 1.5 rounds to 2, but there are only two rollouts: 3 + 2 replayed + 2.
    assert history[-1]["buffer/replayed_share"] == 2 / 7


def test_uncorrected_replay_warns(tiny_model, tmp_path):
    with pytest.warns(UserWarning, match="replayed rollouts are off-policy"):
        replaying_run(tiny_model, tmp_path, model={"minibatches": 2})
