"""Test logprobs and entropies of a vocabulary in parts: by hand, and as those of the whole."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_rl.errors import ConfigError
from lightning_rl.models import heads
from lightning_rl.models.heads import token_logprobs
from lightning_rl.models.parallel.vocabulary import SplitVocabulary
from lightning_rl.models.sampling import Penalties
from tests.support.thread_ranks import ThreadRanks, on_threads

VOCABULARY, WIDTH, TOKENS = 12, 8, 7


def part_of(output: nn.Linear, ranks: ThreadRanks) -> nn.Linear:
    """Return a rank's rows of a head."""
    part = nn.Linear(WIDTH, VOCABULARY // ranks.size, output.bias is not None).double()
    for own, whole in zip(part.parameters(), output.parameters(), strict=True):
        own.data = whole.detach().chunk(ranks.size)[ranks.index].clone()
    return part


@pytest.mark.parametrize("chunk", [2, 1 << 24])  # in backward one token of the vocabulary, and two
def test_by_hand(monkeypatch, chunk):
    """Logits 0, ln 2, ln 4 and ln 1: of a sum of 8, in parts of 1 + 2 and 4 + 1."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(4)], [0.0]], dtype=torch.double)
    hidden, targets = torch.ones(2, 1, dtype=torch.double), torch.tensor([1, 2])

    def work(ranks: ThreadRanks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = nn.Linear(1, 2, bias=False).double()
        own.weight.data = weight.chunk(2)[ranks.index].clone()
        states = hidden.clone().requires_grad_()
        vocabulary = SplitVocabulary(ranks, 4)
        logprobs, entropy = token_logprobs(
            states, own, targets, torch.ones(2, dtype=torch.double), vocabulary=vocabulary
        )
        logprobs.sum().backward()
        return logprobs.detach(), entropy.detach(), own.weight.grad, states.grad

    # H = ln 8 - (2 ln 2 + 4 ln 4) / 8 = 3 ln 2 - 10/8 ln 2.
    entropy = 1.75 * math.log(2)
    slopes = [[-2 / 8, 1 - 4 / 8], [1 - 8 / 8, -2 / 8]]  # of both tokens: 1[t] - p, summed
    # Towards the state: the target's logit less the mean of 1.25 ln 2.
    towards = [math.log(2) * (1 - 1.25), math.log(2) * (2 - 1.25)]
    for rank, (found, spread, grad, back) in enumerate(on_threads(2, work)):
        assert found.tolist() == pytest.approx([math.log(2 / 8), math.log(4 / 8)], rel=1e-14)
        assert spread.tolist() == pytest.approx([entropy] * 2, rel=1e-14)
        assert grad.flatten().tolist() == pytest.approx(slopes[rank], abs=1e-14)
        assert back.flatten().tolist() == pytest.approx(towards, rel=1e-13)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 9, 1 << 24])  # one row at a time, two, all at once
def test_parts_give_what_the_whole_gives(monkeypatch, ranks, bias, chunk):
    """Penalties and tokens that cannot be sampled included; a weight for each output."""
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(5)
    output = nn.Linear(WIDTH, VOCABULARY, bias=bias).double()
    for parameter in output.parameters():
        parameter.data.normal_(generator=generator)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.double)
    targets = torch.tensor([0, 3, 4, 7, 8, 11, 5])
    temperature = torch.tensor([1.0, 0.7, 0.5, 2.0, 1.0, 1.3, 0.6], dtype=torch.double)
    no_end = torch.tensor([True, False, True, True, False, True, False])
    ids = torch.randint(VOCABULARY, (20,), generator=generator)
    begin = torch.arange(TOKENS)
    penalties = Penalties(
        ids, begin, begin + 2, begin + 9,
        *(torch.full((TOKENS,), value, dtype=torch.double) for value in (1.3, 0.2, 0.1)),
    )  # fmt: skip
    upstream = torch.linspace(-1, 2, 2 * TOKENS, dtype=torch.double).reshape(2, TOKENS)

    def scored(head: nn.Linear, **options) -> list[Tensor]:
        states = hidden.clone().requires_grad_()
        scores = token_logprobs(
            states, head, targets, temperature, no_end=no_end, ends=(2, 9),
            penalties=replace(penalties), **options,
        )  # fmt: skip
        torch.autograd.backward(scores, tuple(upstream))
        return [*(x.detach() for x in scores), states.grad, *(p.grad for p in head.parameters())]

    expected = scored(output)
    found = on_threads(
        ranks,
        lambda own: scored(part_of(output, own), vocabulary=SplitVocabulary(own, VOCABULARY)),
    )
    for result in found:
        for mine, whole in zip(result[:3], expected[:3], strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)
    for place in range(3, len(expected)):
        whole = torch.cat([result[place] for result in found])
        torch.testing.assert_close(whole, expected[place], rtol=0, atol=1e-12)
    assert expected[0].abs().max() > 1


@pytest.mark.parametrize("cut", [{"top_k": 3, "top_p": 1.0}, {"min_p": 0.1}])
def test_a_cut_of_the_whole_distribution_is_refused(cut):
    output, ones = nn.Linear(WIDTH, VOCABULARY // 2), torch.ones(TOKENS)
    settings = {name: value * ones for name, value in cut.items()}
    with pytest.raises(ConfigError, match=r"top_k, top_p or min_p, .* tensor=2 no process has one"):
        token_logprobs(
            torch.zeros(TOKENS, WIDTH), output, torch.zeros(TOKENS, dtype=torch.long), ones,
            vocabulary=SplitVocabulary(ThreadRanks(2, 0, [], None), VOCABULARY), **settings,
        )  # fmt: skip
