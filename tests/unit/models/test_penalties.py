"""Test scoring under min-p and penalties on what was written: as engines sampled."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rl.algos.baselines import RLOO, ReinforcePlusPlus
from lightning_rl.algos.turns import RewardToGo
from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling, StructuredOutputs
from lightning_rl.errors import ConfigError
from lightning_rl.models import heads
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead, token_logprobs
from lightning_rl.models.policy import Policy
from lightning_rl.models.sampling import Penalties
from lightning_rl.rollout import SamplingDistribution
from tests.support.engine_checks import sampled
from tests.support.tolerances import distance, norm_rounding, rounding, scores_rounding

VOCABULARY = 11


def naive(logits, target, prompt, written, s: Sampling):
    """Return logprob and entropy in float64, token by token as vLLM's documentation says."""
    z = []
    for token, logit in enumerate(logits):
        if token in prompt or token in written:
            repetition = s.repetition_penalty
            logit = logit / repetition if logit > 0 else logit * repetition
        logit = logit - s.frequency_penalty * written.count(token)
        z.append((logit - s.presence_penalty * (token in written)) / s.temperature)
    z = torch.stack(z)
    p = z.softmax(-1)
    kept = [t for t in range(len(z)) if p[t] >= s.min_p * p.max() or t == target]
    log_p = z[kept].log_softmax(-1)
    return log_p[kept.index(target)], -(log_p.exp() * log_p).sum()


SETTINGS = {
    "repetition": {"repetition_penalty": 1.4},
    "rewarded": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.9},
    "all": {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.8},
    "min_p": {"min_p": 0.4},
    "everything": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_p": 0.3},
}


@pytest.mark.parametrize("chunk", [1, 3 * VOCABULARY, 1 << 24])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_logprobs_entropy_and_gradients_match_float64(monkeypatch, setting, chunk):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(8, VOCABULARY)
    for parameter in linear.parameters():
        parameter.data.normal_(std=0.6, generator=generator)
    ids = torch.randint(VOCABULARY, (40,), generator=generator)
    # Two rollouts: 0-19 with 4 prompt tokens, 20-39 with 6 given before its second turn at 30.
    end = torch.tensor([*range(4, 20), *range(24, 27), *range(30, 40)])
    begin = torch.where(end < 20, 0, 20)
    turn = torch.where(end < 20, 4, torch.where(end < 30, 24, 30))
    sampling = Sampling(temperature=0.8, **setting)
    full = torch.ones(len(end))
    hidden = torch.randn(len(end), 8, generator=generator).requires_grad_()
    scores = token_logprobs(
        hidden,
        linear,
        ids[end],
        full * 0.8,
        min_p=full * sampling.min_p,
        penalties=Penalties(
            ids, begin, turn, end, full * sampling.repetition_penalty,
            full * sampling.presence_penalty, full * sampling.frequency_penalty,
        ),
    )  # fmt: skip
    inputs = [hidden, *linear.parameters()]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    logits = nn.functional.linear(*doubles)
    additions = hidden.shape[1] + 2 * VOCABULARY + 4  # the head, two sums of exp, the penalties
    rows = []
    for row, (b, t, e) in enumerate(zip(*(x.tolist() for x in (begin, turn, end)), strict=True)):
        prompt, written = ids[b:t].tolist(), ids[t:e].tolist()
        rows.append(naive(logits[row], int(ids[e]), prompt, written, sampling))
    expected = [torch.stack([row[part] for row in rows]) for part in (0, 1)]
    for mine, theirs in zip(scores, expected, strict=True):
        bound = rounding(additions, float(logits.detach().abs().max()) / sampling.temperature)
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound)
    upstream = torch.linspace(-1, 2, 2 * len(end)).reshape(2, -1)
    mine = torch.autograd.grad(scores, inputs, tuple(upstream))
    theirs = torch.autograd.grad(expected, doubles, tuple(upstream.double()))
    for a, b in zip(mine, theirs, strict=True):  # there, back twice as far, and summed over tokens
        assert distance(a, b) <= norm_rounding(3 * additions + len(end))


def test_penalties_by_hand():
    """Logits 2 and -1 were seen, 1 not: 2 / 2 = 1, -1 x 2 = -2; then 0.5 twice and 0.25 once."""
    logits = torch.tensor([[2.0, -1.0, 1.0]])
    ids, one = torch.tensor([1, 0, 0, 2]), torch.ones(1)
    # The prompt is [1], written are [0, 0]; the token 2 comes next.
    places = torch.tensor([0]), torch.tensor([1]), torch.tensor([3])
    slope = Penalties(ids, *places, 2 * one, 0.25 * one, 0.5 * one).apply(logits)
    assert logits.tolist() == [[1.0 - 1.0 - 0.25, -2.0, 1.0]]
    assert slope.tolist() == [[0.5, 2.0, 1.0]]


@pytest.mark.parametrize(
    "setting",
    [
        *SETTINGS.values(),
        {"min_p": 0.2, "top_k": 6, "top_p": 0.9},
        {"repetition_penalty": 1.5, "top_p": 0.8, "min_tokens": 4},
    ],
)
def test_ratios_to_the_transformers_engine_start_at_one(
    tiny_model, make_rollout, tmp_path, setting
):
    sampling = Sampling(max_tokens=8, temperature=0.7, **setting)
    policy, rollouts = sampled(tiny_model, make_rollout, tmp_path, sampling)
    batch = pack_rollouts(rollouts)
    with torch.no_grad():
        scores = policy(batch)
        for rollout in rollouts:  # scored as if they had not been set
            own = rollout.sampling
            rollout.sampling = SamplingDistribution(
                own.temperature, own.top_k, own.top_p, min_tokens=own.min_tokens
            )
        without = policy(pack_rollouts(rollouts))
    engine = batch["tokens", "rollout_logprobs"][scores.live]
    assert len(engine) > 150
    sizes = scores.logprobs / sampling.temperature, engine / sampling.temperature
    bound = scores_rounding(tiny_model, *sizes)
    assert float(((scores.logprobs - engine).exp() - 1).abs().max()) < bound
    assert float((without.logprobs - engine).abs().max()) > 0.02


def test_scores_do_not_depend_on_micro_batches_or_selection(tiny_model, random_rollouts):
    rollouts = random_rollouts(82)
    for i, rollout in enumerate(rollouts):
        rollout.sampling = replace(
            rollout.sampling,
            repetition_penalty=1 + 0.1 * (i % 3),
            presence_penalty=0.2 * (i % 2),
            min_p=0.05 * (i % 2),
        )
    policy, batch = Policy(str(tiny_model)), pack_rollouts(rollouts)
    whole, *others = (
        policy.score(pack_rollouts(rollouts), "scored", budget)["tokens", "scored"]
        for budget in (100_000, 30, 1)
    )
    bound = scores_rounding(tiny_model, whole)
    for other in others:
        torch.testing.assert_close(other, whole, rtol=0, atol=bound)
    rows = torch.tensor([5, 2])
    alone = policy.score(select(batch, rows), "scored", 100)["tokens", "scored"]
    batch["tokens", "scored"] = whole
    expected = select(batch, rows)["tokens", "scored"]
    torch.testing.assert_close(alone, expected, rtol=0, atol=bound)


def test_a_turn_counts_from_what_was_given_last(make_rollout):
    """Tokens given to the model are its prompt: their repetition counts, their frequency not."""
    mask = [True, True, False, True, True]
    rollout = make_rollout([7, 8], [3, 3, 4, 3, 5], loss_mask=mask, frequency_penalty=1.0)
    assert pack_rollouts([rollout])["tokens", "turn_start"].tolist() == [0, 0, 2, 2, 5, 5, 5]


def test_nothing_is_added_to_a_batch_without_them(make_rollout):
    batch = pack_rollouts([make_rollout([3], [4, 1])])
    assert "turn_start" not in batch["tokens"]
    assert "min_p" not in batch["rollouts"]


def test_what_was_held_to_a_form_cannot_be_scored(make_rollout):
    with pytest.raises(ConfigError, match=r"'g/0' was constrained by .*data\.evaluation only"):
        pack_rollouts([make_rollout([3], [4, 1], structured=True)])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "has nothing"),
        ({"regex": "a", "choice": ["b"]}, r"\['choice', 'regex'\]"),
        ({"choice": []}, "allows nothing"),
    ],
)
def test_a_form_is_exactly_one(given, words):
    with pytest.raises(ConfigError, match=words):
        StructuredOutputs(**given)


# ---------------------------------------------------------------- another default of torch's


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_are_of_the_dtype_of_the_logits(float64_by_default, dtype):
    # Token 3 was in the prompt, 1 was written twice: (4 / 2 - 2 x 0.5 - 0.25), 2 / 2, 2 x -1.
    logits = torch.tensor([[1.0, 4.0, 1.0, 2.0], [1.0, 1.0, 1.0, -1.0]], dtype=dtype)
    columns = [torch.full((2,), value, dtype=torch.float32) for value in (2.0, 0.25, 0.5)]
    places = [torch.tensor(values) for values in ([0, 0], [1, 1], [3, 1])]
    Penalties(torch.tensor([3, 1, 1]), *places, *columns).apply(logits)
    assert logits.dtype == dtype
    assert logits.tolist() == [[1.0, 0.75, 1.0, 1.0], [1.0, 1.0, 1.0, -2.0]]


@pytest.mark.parametrize("advantage", [RLOO(), ReinforcePlusPlus(), RewardToGo()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_in_the_reward_may_have_any_dtype(
    float64_by_default, make_rollout, advantage, dtype
):
    batch = pack_rollouts([make_rollout([3], [4, 5], reward=r) for r in (1.0, 0.0)])
    batch["tokens", "token_rewards"] = torch.tensor([0, -1.0, -2.0, 0, 0, -1.0], dtype=dtype)
    kept = batch["tokens", "rollout_logprobs"].dtype
    assert advantage(batch)["tokens", "advantages"].dtype == kept


@pytest.mark.parametrize("head", [SharedValueHead, SeparateValueHead])
def test_a_value_head_has_the_dtype_of_the_body(float64_by_default, tiny_model, head):
    policy = Policy(str(tiny_model), value_head=head())  # which tries whether packing is exact
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
