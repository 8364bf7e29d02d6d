"""Scoring under temperature, top-k and top-p: the distribution that was really sampled from."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling
from lightning_rl.models import heads
from lightning_rl.models.heads import token_logprobs
from lightning_rl.models.policy import Policy
from tests.support.doubles import EXACT
from tests.support.engine_checks import sampled
from tests.support.tolerances import rounding, scores_rounding

VOCABULARY = 23


def naive(logits: Tensor, target: int, temperature: float, top_k: int, top_p: float, banned=()):
    """Return logprob and entropy of one token in float64, from a list of what may be sampled.

    The target belongs to it in any case. Gradients flow to ``logits``.
    """
    z = logits / temperature
    banned = () if target in banned else banned  # it shows that none was left out
    order = [t for t in z.argsort(descending=True).tolist() if t not in banned]
    kept = order[:top_k] if top_k else order
    nucleus, mass = [], 0.0
    probs = z[kept].softmax(-1)
    for token, p in zip(kept, probs.tolist(), strict=True):
        if mass >= top_p:
            break
        nucleus.append(token)
        mass += p
    if target not in nucleus:
        nucleus.append(target)
    log_p = z[nucleus].log_softmax(-1)
    return log_p[nucleus.index(target)], -(log_p.exp() * log_p).sum(), nucleus


def problem(rows: int, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(8, VOCABULARY)
    for parameter in linear.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    hidden = torch.randn(rows, 8, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    return linear, hidden, targets


SETTINGS = [
    (0.7, 0, 0.9),
    (0.7, 5, 1.0),
    (0.7, 5, 0.9),
    (1.0, 1, 1.0),
    (1.3, 0, 0.3),
    (0.7, 99, 1.0),
]


def ours(linear, hidden, targets, settings, no_end=None, ends=()):
    temperature, top_k, top_p = zip(*settings, strict=True)
    temperature = torch.tensor(temperature, dtype=hidden.dtype)
    top_k, top_p = torch.tensor(top_k), torch.tensor(top_p)
    no_end = None if no_end is None else torch.tensor(no_end)
    return token_logprobs(hidden, linear, targets, temperature, top_k, top_p, no_end, ends)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1 << 24])
def test_logprobs_entropy_and_gradients_match_float64(monkeypatch, setting, chunk):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    check_against_naive([setting] * 12)


def test_rows_of_a_micro_batch_may_be_sampled_differently():
    check_against_naive([*SETTINGS, (1.0, 0, 1.0), (0.5, 0, 1.0)] * 2)


@pytest.mark.parametrize("chunk", [3 * VOCABULARY, 1 << 24])
def test_end_tokens_that_could_not_be_sampled(monkeypatch, chunk):
    """Alone and together with cuts; target 11 is an end token itself: then none was left out."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    ends = [11, 5]
    targets = problem(12)[2].tolist()
    assert 11 in targets[::2]
    for settings in ([(0.7, 0, 1.0)] * 12, [(0.7, 5, 0.9), (1.0, 0, 0.5), (1.3, 3, 1.0)] * 4):
        check_against_naive(settings, [i % 2 == 0 for i in range(12)], ends)


def check_against_naive(settings, no_end=None, ends=()):
    # In float64 a gradient is right or not; float32 only shows that few of its digits are lost.
    for dtype, lost in ((torch.float64, EXACT), (torch.float32, 1e-4)):
        linear, hidden, targets = problem(len(settings))
        linear, hidden = linear.to(dtype), hidden.detach().to(dtype).requires_grad_()
        check_scores(linear, hidden, targets, settings, no_end, ends, lost)


def check_scores(linear, hidden, targets, settings, no_end, ends, lost):
    scores = ours(linear, hidden, targets, settings, no_end, ends)
    banned = [ends if flag else () for flag in no_end or [False] * len(settings)]
    inputs = [hidden, *linear.parameters()]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    logits = nn.functional.linear(*doubles)
    rows = [
        naive(logits[i], int(targets[i]), *settings[i], banned[i]) for i in range(len(settings))
    ]
    expected = [torch.stack([row[part] for row in rows]) for part in (0, 1)]
    # Where they cancel, a logit is still off by what its terms are.
    terms = nn.functional.linear(*(x.detach().abs() for x in inputs)).amax(1)
    magnitude = max(float(x) / setting[0] for x, setting in zip(terms, settings, strict=True))
    bound = 2 * rounding(hidden.shape[1] + VOCABULARY, magnitude, hidden.dtype)
    for mine, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound)
    upstream = torch.linspace(-1, 2, 2 * len(settings), dtype=hidden.dtype).reshape(2, -1)
    mine = torch.autograd.grad(scores, inputs, tuple(upstream))
    theirs = torch.autograd.grad(expected, doubles, tuple(upstream.double()))
    for a, b in zip(mine, theirs, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= lost * (b.norm() + 1e-3)


def by_hand(probabilities, targets, top_k, top_p) -> list[float]:
    """Return probabilities of targets after the cut, from logits that are log probabilities."""
    linear = nn.Linear(1, len(probabilities), bias=False)
    # Python has one logarithm of one number: kernels may have two, and break a tie.
    linear.weight.data = torch.tensor([[math.log(p)] for p in probabilities]).double()
    settings = [(1.0, top_k, top_p)] * len(targets)
    hidden = torch.ones(len(targets), 1).double()
    scores = ours(linear, hidden, torch.tensor(targets), settings)
    return scores[0].exp().tolist()


def test_cuts_by_hand():
    p = [0.5, 0.25, 0.15, 0.1]
    # The two likeliest: 0.75 in all
    assert by_hand(p, [0, 1], 2, 1.0) == pytest.approx([2 / 3, 1 / 3])
    # 0.5 is short of 0.7, so 0.25 comes in: 0.75 in all; at 0.8 the third does too: 0.9
    assert by_hand(p, [0, 1], 0, 0.7) == pytest.approx([2 / 3, 1 / 3])
    assert by_hand(p, [0, 1, 2], 0, 0.8) == pytest.approx([5 / 9, 25 / 90, 1 / 6])
    # Top-p counts what top-k left: of the first two 2/3 and 1/3, 0.6 needs only one
    assert by_hand(p, [0], 2, 0.6) == pytest.approx([1.0])
    assert by_hand(p, [0, 1], 2, 0.7) == pytest.approx([2 / 3, 1 / 3])


def test_a_sampled_token_outside_of_the_cut_is_kept():
    p = [0.5, 0.25, 0.15, 0.1]
    # 0.1 joins the nucleus {0.5, 0.25}: 0.1 / 0.85, and so for top-k
    assert by_hand(p, [3], 0, 0.7) == pytest.approx([0.1 / 0.85])
    assert by_hand(p, [3], 2, 1.0) == pytest.approx([0.1 / 0.85])
    # and the likeliest one stays beside it, also where 1 - top_p rounds to 1
    assert by_hand(p, [0, 1], 0, 1e-9) == pytest.approx([1.0, 1 / 3])


def test_ties_with_the_kth_are_kept_as_engines_keep_them():
    p = [0.4, 0.2, 0.2, 0.2]
    assert by_hand(p, [0, 1, 2, 3], 2, 1.0) == pytest.approx(p)


def test_without_cuts_it_is_plain_scoring():
    linear, hidden, targets = problem(6)
    plain = token_logprobs(hidden, linear, targets, torch.full((6,), 0.7))
    cut = ours(linear, hidden, targets, [(0.7, 0, 1.0)] * 6)
    for a, b in zip(plain, cut, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (5, 1.0), (5, 0.9)])
def test_ratios_to_the_transformers_engine_start_at_one(
    tiny_model, make_rollout, tmp_path, top_k, top_p
):
    sampling = Sampling(max_tokens=8, temperature=0.7, top_k=top_k, top_p=top_p)
    policy, rollouts = sampled(tiny_model, make_rollout, tmp_path, sampling)
    batch = pack_rollouts(rollouts)
    with torch.no_grad():
        scores = policy(batch)
        # Scored as if nothing had been cut, where something was, ratios are far from 1.
        batch["rollouts", "top_k"].zero_()
        batch["rollouts", "top_p"].fill_(1.0)
        uncut = policy(batch)
    engine = batch["tokens", "rollout_logprobs"][scores.live]
    assert len(engine) > 200
    bound = scores_rounding(tiny_model, engine / sampling.temperature)
    assert float((scores.logprobs - engine).abs().max()) < bound
    assert (float((uncut.logprobs - engine).abs().max()) > 0.05) is (top_k > 0 or top_p < 1)


def test_scores_do_not_depend_on_micro_batches_where_only_some_are_cut(tiny_model, random_rollouts):
    rollouts = random_rollouts(81)
    for i, rollout in enumerate(rollouts):
        top_p, top_k = (0.8, 0) if i % 3 == 0 else (1.0, 4 * (i % 2))
        rollout.sampling = replace(rollout.sampling, top_p=top_p, top_k=top_k)
    policy = Policy(str(tiny_model))
    whole, *others = (
        policy.score(pack_rollouts(rollouts), "scored", budget)["tokens", "scored"]
        for budget in (100_000, 30, 1)
    )
    for other in others:
        bound = scores_rounding(tiny_model, whole)
        torch.testing.assert_close(other, whole, rtol=0, atol=bound)


@pytest.mark.parametrize("cut", [{}, {"top_k": 5, "top_p": 0.9}])
def test_with_min_tokens_ratios_start_at_one_too(tiny_model, make_rollout, tmp_path, cut):
    sampling = Sampling(max_tokens=8, temperature=0.7, min_tokens=4, **cut)
    policy, rollouts = sampled(tiny_model, make_rollout, tmp_path, sampling)
    batch = pack_rollouts(rollouts)
    scores = policy(batch)
    for rollout in rollouts:
        rollout.sampling = replace(rollout.sampling, min_tokens=0)
    with torch.no_grad():
        without = policy(pack_rollouts(rollouts))
    engine = batch["tokens", "rollout_logprobs"][scores.live]
    assert min(len(r.token_ids) for r in rollouts) >= 4
    gap = float((scores.logprobs.detach() - engine).abs().max())
    assert gap < scores_rounding(tiny_model, engine / sampling.temperature)
    assert float((without.logprobs - engine).abs().max()) > 0.1
    (-scores.logprobs.sum() - scores.entropy.sum()).backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)


def test_min_tokens_counts_in_each_turn_anew(make_rollout):
    mask = [True] * 3 + [False] + [True] * 3
    rollout = make_rollout([3, 2], [4, 5, 6, 2, 7, 8, 1], loss_mask=mask, min_tokens=2)
    batch = pack_rollouts([rollout, make_rollout([3], [4, 1])])
    expected = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    assert batch["tokens", "no_end"].int().tolist() == expected
    assert "no_end" not in pack_rollouts([make_rollout([3], [4, 1])])["tokens"]
