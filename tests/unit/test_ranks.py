"""What several ranks share, as far as one process can tell; see tests/integration/test_ddp.py."""

from itertools import chain

import pytest

from lightning_rl import dist
from lightning_rl.algos.advantages import GRPO
from lightning_rl.checks import check_groups
from lightning_rl.collect.ranks import interleaved
from lightning_rl.collect.source import GroupSource
from lightning_rl.data.packing import pack_rollouts, silent
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.base import Sampling
from lightning_rl.errors import ConfigError, FilterError
from lightning_rl.models.policy import load_tokenizer


@pytest.fixture
def source(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))

    def make(rank: int = 0, ranks: int = 1) -> GroupSource:
        prompts = IterablePrompts(lambda: [{"prompt": f"{n}="} for n in range(7)], seed=3)
        prompts.load(tokenizer)
        return GroupSource(prompts, 6 // ranks, 2, Sampling(), seed=5, rank=rank, ranks=ranks)

    return make


def issued(source: GroupSource, count: int) -> list[tuple[str, int]]:
    return [(r.id, r.seed) for _ in range(count) for r in source.next()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_issue_what_one_process_does(source, ranks):
    alone, sources = source(), [source(rank, ranks) for rank in range(ranks)]
    for iteration in range(3):  # 18 draws of 7 prompts: into a third epoch
        for one in (alone, *sources):
            one.begin(iteration)
        shares = [issued(one, 6 // ranks) for one in sources]
        assert sorted(chain(*shares)) == sorted(issued(alone, 6))
        assert len({str(one.prompts.state_dict()) for one in (alone, *sources)}) == 1


def test_a_rank_that_lags_behind_draws_up_and_loses_no_prompt(source):
    fast, slow = source(0, 2), source(1, 2)
    quick = [fast.next()[0].prompt.id for _ in range(3)]
    late = [slow.next()[0].prompt.id]
    slow.catch_up(fast.drawn)
    fast.catch_up(fast.drawn)
    assert slow.prompts.state_dict() == fast.prompts.state_dict()
    late += [slow.next()[0].prompt.id for _ in range(2)]
    # The first six of the order, each once.
    assert sorted(quick + late) == sorted(p.id for p in source().prompts.draw(6))


def test_a_restored_source_goes_on(source):
    first = source(1, 2)
    first.next()
    first.catch_up(3)
    second = source(1, 2)
    second.load_state_dict(first.state_dict())
    assert second.drawn == 3
    assert issued(second, 4) == issued(first, 4)


def test_shares_are_put_together_in_the_order_of_places(make_rollout):
    groups = [[make_rollout([3], [1], group_id=str(place))] for place in range(5)]
    assert interleaved([groups[::2], groups[1::2]]) == groups
    assert interleaved([groups, []]) == groups


def test_groups_must_be_shared_evenly(monkeypatch):
    check_groups(4, 4)
    with pytest.raises(ConfigError, match="minibatches=5 exceeds groups_per_iteration=4;"):
        check_groups(4, 5)
    monkeypatch.setattr("lightning_rl.checks.world_size", lambda: 2)
    check_groups(4, 2)
    with pytest.raises(ConfigError, match=r"groups_per_iteration=5 cannot be shared by 2 proc"):
        check_groups(5, 1)
    with pytest.raises(ConfigError, match=r"minibatches=3 exceeds .*=4 on 2 processes"):
        check_groups(4, 3)


def test_a_silent_pack_leaves_the_batch_as_it_is(make_rollout):
    batch = GRPO()(pack_rollouts([make_rollout([3], [4, 1])]))
    assert silent(batch)["tokens", "loss_mask"].tolist() == [False, False, False]
    assert batch["tokens", "loss_mask"].tolist() == [False, True, True]


def test_one_process_talks_to_nobody():
    assert (dist.world_size(), dist.rank()) == (1, 0)
    assert dist.gather("a") == ["a"]
    assert dist.mine([1, 2, 3]) == dist.deal([1, 2, 3]) == [1, 2, 3]
    assert dist.total({"a": 2.0}) == {"a": 2.0}
    assert (dist.any_rank(True), dist.any_rank(False), dist.largest(2.5)) == (True, False, 2.5)
    with pytest.raises(FilterError, match=r"^none passed$"), dist.every_rank():
        raise FilterError("none passed")
