"""Test seeds: any of them works, small ones deal as ever, and a drawn one is told and kept."""

import pytest

from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError
from lightning_rl.learn.offline import RecordedGroups
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.run.seeding import derived_seed, drawn_seed, run_seed
from tests.support.small_run import grpo

DATE = 20_261_122
LARGE = [18_446_634, DATE, 2**32 - 1, 2**63, 10**30]


@pytest.mark.parametrize("seed", LARGE)
def test_a_large_seed_deals_minibatches(tiny_model, train_on, random_batch, seed):
    module = grpo(tiny_model, minibatches=2, seed=seed)
    train_on(module, [random_batch(51), random_batch(52)])
    assert module.iteration == 2


@pytest.mark.parametrize("seed", LARGE)
def test_and_orders_prompts_and_recorded_groups(tiny_model, make_rollout, seed):
    prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(9)], seed=seed)
    prompts.load(load_tokenizer(str(tiny_model)))
    first, second = ([prompt.id for prompt in prompts.draw(9)] for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    groups = [[make_rollout([3], [4], group_id=str(n))] for n in range(9)]
    recorded = RecordedGroups(groups, shuffle=True, seed=seed)
    assert sorted(r.group_id.split("/")[1] for r in recorded.draw(9)) == list("012345678")


def test_small_seeds_draw_what_they_always_drew():
    """Runs of the quickstart and the recipes stay the same, bit by bit."""
    for seed, iteration, epoch in ((0, 0, 0), (0, 27, 1), (7, 3, 2), (18_446_633, 5, 0)):
        plain = (seed * 1_000_003 + iteration) * 1_000_003 + epoch
        assert plain < 2**64
        assert derived_seed(seed, iteration, epoch) == plain


def test_no_two_places_of_a_run_share_a_seed():
    for seed in (0, DATE, 2**32 - 1):
        seeds = {derived_seed(seed, i, epoch) for i in range(500) for epoch in range(4)}
        assert len(seeds) == 2000
        assert len({s % 2**32 for s in seeds}) == 2000  # torch's generator on CPUs uses 32 bits


def test_a_negative_seed_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="seed=-1 must be >= 0"):
        grpo(tiny_model, seed=-1)
    with pytest.raises(ConfigError, match="seed=-5 must be >= 0"):
        run_seed(-5)


def test_ranks_share_what_the_first_drew(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # as Lightning starts the second, with its environment
    monkeypatch.setenv("PL_GLOBAL_SEED", "1234567")
    assert drawn_seed() == 1234567
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with pytest.raises(ConfigError, match="each would draw its own seed"):
        drawn_seed()
