"""Test the probe after a sync: what it lets pass, when it asks again, and what it catches."""

import numpy as np
import pytest
import torch

from benchmarks import probe as benchmark
from lightning_rl.engines import TransformersEngine
from lightning_rl.errors import StaleWeightsError
from lightning_rl.learn import probe
from lightning_rl.learn.probe import AGAIN_TOKENS, Gap, probe_again, probe_gap, require_agreement
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt

PROMPTS = [Prompt("a", "", [3, 4, 2]), Prompt("b", "", [5, 2])]


def gap(*by_prompt) -> Gap:
    tensors = tuple(torch.tensor(gaps) for gaps in by_prompt)
    everything = torch.cat(tensors)
    return Gap(float(everything.max()), "7", -1.0, -2.0, float(everything.mean()), tensors)


def judge(first, second=None, dtype="bfloat16", max_gap=None):
    """Tell whether the probe asked again; without ``second`` it must not."""
    asked = []

    def again():
        asked.append(True)
        return second

    require_agreement(first, again, 7, max_gap, dtype, dtype)
    return bool(asked)


def test_means_count_an_outlier_as_what_it_may_be_at_most():
    found = gap([0.0, 0.5], [torch.inf] + [0.5] * 31)
    # All: (0.5 + 1 + 31 * 0.5) / 34. The first prompt has 2 tokens of 16: 0.5 / 16; the second 32.
    assert found.means(outlier=1.0) == pytest.approx((17 / 34, 16.5 / 32))
    assert gap([1.0, 1.0], [0.0]).means(1.0) == pytest.approx((2 / 3, 2 / 16))


def test_in_float32_one_token_is_enough():
    assert not judge(gap([0.9e-3, 0.0]), dtype="float32")
    with pytest.raises(StaleWeightsError, match=r"version 7, .* disagree by 0\.0011 nats; most"):
        judge(gap([1.1e-3, 0.0]), dtype="float32")
    with pytest.raises(StaleWeightsError, match=r"disagree by 0\.0011 nats"):
        judge(gap([1.1e-3]), dtype="bfloat16", second=gap([1.1e-3]), max_gap=1e-3)


def test_in_16_bits_one_token_asks_again():
    assert not judge(gap([0.24, 0.0], [0.1, 0.24]))
    good = gap([0.01] * 15 + [torch.inf], [0.02] * 16)
    assert judge(gap([0.477, 0.0]), good)  # the largest of 3,916 good tokens, and worse once more


def test_what_a_second_probe_catches():
    everywhere = gap([0.3] * 16, [0.3] * 16)
    with pytest.raises(StaleWeightsError, match=r"0\.3 nats on average over 32 tokens; most on"):
        judge(gap([0.477]), everywhere)
    # One replica of five is stale: its prompt shows it, the mean of all does not.
    one = gap([3.0] * 16, *[[0.01] * 16] * 4)
    assert one.means(1.0)[0] < 0.25
    with pytest.raises(StaleWeightsError, match=r"1 nats on average over one prompt's tokens"):
        judge(gap([3.0], [0.01]), one)
    with pytest.raises(StaleWeightsError):
        judge(gap([torch.inf]), gap([torch.inf] * 16))  # NaN, as a broken model computes


@pytest.fixture(scope="module")
def synced(tiny_model):
    policy = Policy(str(tiny_model))
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model)
    engine.load_weights(policy.named_weights(), 0)
    return engine, policy


def test_a_second_probe_has_other_tokens_and_leaves_randomness_alone(synced, monkeypatch):
    rollouts = []
    measure = probe._gap
    monkeypatch.setattr(probe, "_gap", lambda p, rs: rollouts.append(rs) or measure(p, rs))
    before = torch.get_rng_state()
    first, second = probe_gap(*synced, PROMPTS, 1.0), probe_again(*synced, PROMPTS, 1.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert max(first.value, second.value) < 1e-4
    assert {r.seed for r in rollouts[0]}.isdisjoint({r.seed for r in rollouts[1]})
    assert [r.prompt for r in rollouts[1]] == PROMPTS
    assert 2 < max(map(len, second.by_prompt)) <= AGAIN_TOKENS
    # Where there is room for a token only, there are as many completions.
    monkeypatch.setattr(type(synced[0]), "max_length", 4)
    third = probe_again(*synced, PROMPTS[:1], 1.0)
    assert len({r.seed for r in rollouts[2]}) == len(rollouts[2]) == AGAIN_TOKENS
    assert list(map(len, third.by_prompt)) == [AGAIN_TOKENS]


def test_the_simulation_judges_as_the_probe_does():
    draws = np.random.default_rng(0).exponential(0.24, (40, benchmark.PROMPTS, AGAIN_TOKENS))
    draws[:10, 0] *= 4  # one prompt's alone
    for gaps, alarm in zip(draws, benchmark.alarms(draws), strict=True):
        wrong = probe._wrong_means(gap(*gaps.tolist()), benchmark.BOUND)
        assert (wrong is not None) == alarm
    assert 5 < benchmark.alarms(draws).sum() < 35


def test_the_simulated_gaps_are_the_published_ones():
    """The t's own 95% is 0.113 and its median largest 0.477, by order statistics of 3,916 draws."""
    random = np.random.default_rng(0)
    drawn = benchmark.GOOD[0].draw(np.full((100, 1), 0.0426), 3916, random)[:, 0]
    assert np.quantile(drawn, 0.95) == pytest.approx(0.113, rel=0.01)
    assert np.median(drawn.max(1)) == pytest.approx(0.477, rel=0.1)
    assert benchmark.simulate(benchmark.GOOD[1], 1, 2_000, 2)["alarms"] == 0
