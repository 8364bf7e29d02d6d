"""Test the policy head against a naive float64 implementation, and the value heads."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from benchmarks.support.allocations import peak_while
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models import heads
from lightning_rl.models.attention.packed import build_layout
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead, token_logprobs
from lightning_rl.models.logit_map import LogitMap, logit_map_of
from lightning_rl.models.policy import Policy
from lightning_rl.models.sampling import Penalties
from tests.support.tiers import follows_memory
from tests.support.tolerances import distance, norm_rounding, rounding, scores_rounding


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(hidden, weight, bias) / temperature[:, None]
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(bias: bool) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(8, 11, bias=bias)
    for parameter in linear.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    hidden = torch.randn(7, 8, generator=generator).requires_grad_()
    targets = torch.randint(11, (7,), generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.5, 2.0, 1.0, 1.3, 0.6])
    return linear, hidden, targets, temperature


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 11, 33, 1 << 24])  # one row at a time ... all at once
def test_logprobs_entropy_and_all_gradients_match_float64(monkeypatch, bias, chunk):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", chunk)
    linear, hidden, targets, temperature = problem(bias)
    ours = token_logprobs(hidden, linear, targets, temperature)
    inputs = [hidden, *linear.parameters()]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    theirs = naive(*doubles[:2], doubles[2] if bias else None, targets, temperature.double())
    largest = max(float(reference.detach().abs().max()) for reference in theirs)
    bound = rounding(sum(linear.weight.shape), magnitude=largest)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), reference, rtol=0, atol=bound)
    # A different weight per token and output, so that no two errors cancel.
    upstream = torch.linspace(-1, 2, 14).reshape(2, 7)
    mine = torch.autograd.grad(ours, inputs, tuple(upstream))
    reference = torch.autograd.grad(theirs, doubles, tuple(upstream.double()))
    for a, b in zip(mine, reference, strict=True):
        # A probability is off, relatively, by what its logprob is off absolutely.
        assert distance(a, b) <= bound


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_output_alone_has_its_own_gradient(monkeypatch, used):
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 33)
    linear, hidden, targets, temperature = problem(False)
    inputs = [hidden, linear.weight]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    ours = token_logprobs(hidden, linear, targets, temperature)[used]
    theirs = naive(*doubles, None, targets, temperature.double())[used]
    upstream = torch.linspace(-1, 2, 7)
    mine = torch.autograd.grad(ours, inputs, upstream)
    reference = torch.autograd.grad(theirs, doubles, upstream.double())
    for a, b in zip(mine, reference, strict=True):
        assert (a.double() - b).norm() <= 3e-6 * b.norm()


@follows_memory
@pytest.mark.parametrize("outputs", [(0,), (0, 1)])
def test_of_many_chunks_as_much_is_there_as_of_one(monkeypatch, outputs):
    """Logits and their exponentials, or a gradient and what it is made of; no earlier chunk's."""
    rows, vocabulary = 16, 1 << 14
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", rows * vocabulary)
    linear = nn.Linear(1, vocabulary, bias=False)
    hidden, targets = torch.randn(5 * rows, 1), torch.zeros(5 * rows, dtype=torch.long)

    def both_passes():
        found = token_logprobs(hidden, linear, targets, torch.ones(5 * rows))
        torch.stack([found[n].sum() for n in outputs]).sum().backward()

    assert 2.0 < peak_while(both_passes) / (4 * rows * vocabulary) < 2.5


def test_a_frozen_head_gets_no_gradient_but_passes_one_on():
    linear, hidden, targets, temperature = problem(True)
    (expected,) = torch.autograd.grad(
        token_logprobs(hidden, linear, targets, temperature)[0].sum(), hidden
    )
    linear.requires_grad_(False)
    token_logprobs(hidden, linear, targets, temperature)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=0)
    assert linear.weight.grad is None
    assert linear.bias.grad is None


def test_the_hand_calculated_case():
    # Logits (ln 3, 0) at temperature 1: probabilities 3/4 and 1/4.
    linear = nn.Linear(1, 2, bias=False)
    linear.weight.data = torch.tensor([[3.0], [1.0]]).log()
    logprobs, entropy = token_logprobs(
        torch.ones(2, 1), linear, torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    )
    # At temperature 1/2 the logits double: probabilities 9/10 and 1/10.
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.1])
    assert entropy.tolist() == pytest.approx([0.562335, 0.325083], abs=1e-6)


def test_a_cap_and_a_scale_by_hand():
    """Products (2, -1), halved and capped at 1, are tanh(1) and tanh(-1/2)."""
    products = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    slope = LogitMap(scale=0.5, cap=1.0).apply(products)
    high, low = 0.761594155956, -0.462117157260
    assert products.tolist() == [[pytest.approx(high), pytest.approx(low)]]
    halves = [(1 - high**2) / 2, (1 - low**2) / 2]
    assert slope.tolist() == [pytest.approx(halves)]
    products = torch.tensor([[2.0, -1.0]])
    assert LogitMap(scale=0.5).apply(products).tolist() == [[0.5]]
    assert products.tolist() == [[1.0, -0.5]]


def test_what_configurations_say_of_logits():
    assert logit_map_of(Qwen2Config()) is None
    assert logit_map_of(GraniteConfig(logits_scaling=1.0)) is None
    assert logit_map_of(GraniteConfig(logits_scaling=8.0)) == LogitMap(scale=0.125)
    assert logit_map_of(CohereConfig(logit_scale=0.25)) == LogitMap(scale=0.25)
    assert logit_map_of(Gemma2Config(final_logit_softcapping=30.0)) == LogitMap(cap=30.0)


@pytest.mark.parametrize("logit_map", [LogitMap(0.5, 1.5), LogitMap(cap=0.8), LogitMap(3.0)])
def test_mapped_logits_and_all_gradients_match_autograd(logit_map):
    linear, hidden, targets, temperature = problem(True)
    linear, hidden = linear.double(), hidden.detach().double().requires_grad_()
    inputs = [hidden, *linear.parameters()]
    # An engine penalizes what it has seen: of tokens 0 to 6 those before each.
    ids, begin, end = torch.arange(7), torch.zeros(7, dtype=torch.long), torch.arange(7)
    penalties = Penalties(
        ids, begin, begin, end, torch.full((7,), 1.3), torch.full((7,), 0.2), torch.full((7,), 0.1)
    )
    found = token_logprobs(
        hidden, linear, targets, temperature.double(), penalties=penalties, logit_map=logit_map
    )
    logits = linear(hidden) * logit_map.scale
    if logit_map.cap is not None:
        logits = logit_map.cap * (logits / logit_map.cap).tanh()
    seen = torch.arange(11) < end[:, None]
    penalized = torch.where(logits > 0, logits / 1.3, logits * 1.3) - 0.1 - 0.2
    logits = torch.where(seen, penalized, logits) / temperature.double()[:, None]
    log_p = logits.log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    upstream = tuple(torch.linspace(-1, 2, 14).double().reshape(2, 7))
    mine, theirs = (torch.autograd.grad(x, inputs, upstream) for x in (found, expected))
    for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # 1.3 in float32 is 5e-8 off


def test_greedy_tokens_are_scored_at_temperature_one():
    linear, hidden, targets, _ = problem(False)
    greedy = token_logprobs(hidden, linear, targets, torch.zeros(7))[0]
    assert torch.equal(greedy, token_logprobs(hidden, linear, targets, torch.ones(7))[0])


def value_gradients(policy: Policy, batch) -> tuple[Tensor, dict[str, Tensor]]:
    values = policy(batch).values
    ((values - 1) ** 2).sum().backward()
    return values.detach(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("head", [SharedValueHead, SeparateValueHead])
def test_values_are_zero_at_first_one_per_loss_token(tiny_model, random_batch, head):
    batch = random_batch(1)
    values, _ = value_gradients(Policy(str(tiny_model), head()), batch)
    assert values.shape == (int(batch["tokens", "loss_mask"].sum()),)
    assert values.dtype == torch.float32
    assert not values.any()


@pytest.fixture
def scored(tiny_model, tmp_path):
    """Saves the tiny model with the head of a reward model, of so many labels."""

    def save(kind, labels: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = kind.from_pretrained(tiny_model, num_labels=labels, dtype=torch.float32)
            nn.init.normal_(model.score.weight)
        model.save_pretrained(tmp_path / "scored")
        return model

    return save


@pytest.mark.parametrize("kind", [Qwen2ForSequenceClassification, Qwen2ForTokenClassification])
def test_a_critic_begins_with_what_a_reward_model_predicts(
    tiny_model, scored, tmp_path, make_rollout, kind
):
    model = scored(kind, 1).eval()
    policy = Policy(str(tiny_model), SeparateValueHead(str(tmp_path / "scored")))
    hidden = model.base_model(torch.tensor([[3, 4, 5, 6]])).last_hidden_state[0]
    expected = model.score(hidden[1:])[:, 0]  # after 4, 5 and 6
    values = policy(pack_rollouts([make_rollout([3, 4], [5, 6, 1])])).values
    terms = float((hidden[1:].abs() @ model.score.weight.abs().T).max())
    bound = scores_rounding(model.config, torch.tensor(terms))
    assert expected.abs().min() > 4 * bound
    torch.testing.assert_close(values, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dropped", ["two labels", "no head in the file"])
def test_a_head_that_predicts_no_value_is_left_out_with_a_word(
    tiny_model, scored, tmp_path, random_batch, dropped
):
    model = scored(Qwen2ForSequenceClassification, 2 if dropped == "two labels" else 1)
    if dropped != "two labels":
        model.base_model.save_pretrained(tmp_path / "scored")
        model.config.architectures = ["Qwen2ForSequenceClassification"]
        model.config.save_pretrained(tmp_path / "scored")
    with pytest.warns(UserWarning, match="its head is left out, and values begin at 0"):
        policy = Policy(str(tiny_model), SeparateValueHead(str(tmp_path / "scored")))
    assert not policy(random_batch(1)).values.any()


def moved(head):
    """Move a head as training does, since a head of zeros passes no gradient to the body."""
    nn.init.normal_(head.linear.weight)
    return head


def test_a_shared_head_trains_the_body_unless_detached(tiny_model, random_batch):
    for detach in (False, True):
        policy = Policy(str(tiny_model), SharedValueHead(detach=detach))
        moved(policy.value_head)
        _, gradients = value_gradients(policy, random_batch(1))
        assert gradients["value_head.linear.weight"].any()
        assert any(name.startswith("lm.") for name in gradients) is not detach


def test_a_shared_head_reads_the_state_that_predicts_the_token(tiny_model, make_rollout):
    batch = pack_rollouts([make_rollout([3, 4], [5, 6, 1])])
    policy = Policy(str(tiny_model), SharedValueHead())
    moved(policy.value_head)
    layout = build_layout(batch)
    hidden = policy.lm.base_model(
        input_ids=torch.tensor([[3, 4, 5, 6]]), use_cache=False, layout=layout
    ).last_hidden_state[0]
    expected = policy.value_head.linear(hidden[1:])[:, 0]  # after 4, 5 and 6
    torch.testing.assert_close(policy(batch).values, expected, rtol=0, atol=1e-6)


def test_a_separate_body_shares_nothing_with_the_policy(tiny_model, random_batch):
    policy = Policy(str(tiny_model), SeparateValueHead())
    moved(policy.value_head)
    batch = random_batch(1)
    _, gradients = value_gradients(policy, batch)
    assert gradients
    assert all(name.startswith("value_head.") for name in gradients)
    before = policy(batch)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.mul_(1.5)
    after = policy(batch)
    assert torch.equal(after.values, before.values)
    assert not torch.allclose(after.logprobs, before.logprobs)


@pytest.mark.parametrize("fp32", [False, True])
def test_logits_in_float32_under_bfloat16(tiny_model, random_batch, fp32):
    """The head itself then rounds states in bfloat16 no more, forward and backward."""
    policy = Policy(str(tiny_model), loading={"cast_lm_head_to_fp32": fp32})
    batch, head = random_batch(1), policy.lm.get_output_embeddings().weight
    states = []
    policy.lm.model.norm.register_forward_hook(lambda module, args, output: states.append(output))
    with torch.autocast("cpu", torch.bfloat16):
        scores = policy(batch)
        grad = torch.autograd.grad(scores.logprobs.sum(), states[0])[0]
    layout = build_layout(batch)
    hidden = states[0][0].detach().double().requires_grad_()
    logits = hidden[layout.predictors] @ head.detach().double().T / 0.7
    targets = batch["tokens", "input_ids"][scores.live]
    exact = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    exact_grad = torch.autograd.grad(exact.sum(), hidden)[0]
    gap = float((scores.logprobs - exact).abs().max())
    grad_gap = float((grad[0] - exact_grad).norm() / exact_grad.norm())
    if fp32:
        bound = rounding(sum(head.shape), magnitude=float(logits.detach().abs().max()))
        assert gap < bound
        assert grad_gap < bound
    else:  # bfloat16 has 8 bits
        assert gap > 1e-3
        assert grad_gap > 1e-4


def test_logits_in_float32_of_weights_in_bfloat16(tiny_model, random_batch):
    """The result is exact for states and weights as they are with ``precision: bf16-true``."""
    policy = Policy(str(tiny_model), loading={"cast_lm_head_to_fp32": True}).bfloat16()
    batch, states = random_batch(1), []
    policy.lm.model.norm.register_forward_hook(lambda module, args, output: states.append(output))
    scores = policy(batch)
    scores.logprobs.sum().backward()
    assert states[0].dtype == torch.bfloat16
    hidden = states[0][0, build_layout(batch).predictors].double()
    head = policy.lm.get_output_embeddings().weight
    logits = hidden @ head.detach().double().T / 0.7
    targets = batch["tokens", "input_ids"][scores.live]
    exact = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    bound = rounding(sum(head.shape), magnitude=float(exact.detach().abs().max()))
    torch.testing.assert_close(scores.logprobs.double(), exact, rtol=0, atol=bound)
    assert head.grad.dtype == torch.bfloat16
    assert bool(head.grad.any())


class Copies(TorchDispatchMode):
    """Numbers of a weight that are cast, and added to its gradient; products, by their dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.cast, self.added, self.products = weight, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            of_weight = args[0].untyped_storage().data_ptr() == self.weight.data_ptr()
            self.cast += result.numel() if of_weight else 0
        if function is torch.ops.aten.add_.Tensor:  # of what is as large, the gradient alone
            of_weight = args[0].untyped_storage().nbytes() == self.weight.nbytes
            self.added += result.numel() if of_weight else 0
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.products.append(result.dtype)
        return result


@pytest.mark.parametrize(("rows", "columns"), [(7, 1), (2, 4), (1, 11)])
def test_weights_are_cast_and_their_gradient_is_summed_once_a_pass(monkeypatch, rows, columns):
    """Chunks do not cast anew; a weight's gradient is one product in 16 bits, added in 32.

    Of 7 x 11 logits a chunk has those of 7, 2 or 1 states; in backward all 11, 3 or 1 columns.
    """
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 11 * rows)
    linear, hidden, targets, temperature = problem(False)
    chunks, size = -(-7 // rows), linear.weight.numel()
    with Copies(linear.weight.detach()) as copies:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as Lightning's is
            logprobs, _ = token_logprobs(hidden, linear, targets, temperature)
        assert copies.cast == size
        logprobs.sum().backward()  # where autocast is off, as in a thread of its own
    assert copies.cast == 2 * size
    assert copies.added == size
    # Logits forward and again backward, then the gradients of states and weight.
    assert copies.products == (chunks + 3 * columns) * [torch.bfloat16]
    assert linear.weight.grad.dtype == hidden.grad.dtype == torch.float32
    doubles = [x.detach().double().requires_grad_() for x in (hidden, linear.weight)]
    naive(*doubles, None, targets, temperature.double())[0].sum().backward()
    for mine, exact in zip((hidden, linear.weight), doubles, strict=True):
        gap = (mine.grad - exact.grad).norm() / exact.grad.norm()
        assert 1e-4 < gap < norm_rounding(sum(linear.weight.shape), torch.bfloat16)


def test_chunks_of_a_large_vocabulary_by_device():
    """The chunks of 16,384 tokens of 151,936 words have 110 rows on a CPU, 883 on a GPU.

    Compiled 220, where logits have 16 bits, since no copy in float32 is made. Of columns, about
    1,024 and 2,048.
    """
    states = torch.empty(16_384, 1)
    for compiled, dtype, count in (
        (False, torch.float32, 149),
        (True, torch.float32, 149),
        (True, torch.bfloat16, 75),
    ):
        rows = heads._chunks(16_384, 151_936, states.to(dtype), compiled)
        columns = heads._chunks(151_936, 16_384, states.to(dtype), compiled, heads.ALIGNED)
        for chunks, total, step in ((rows, 16_384, 1), (columns, 151_936, 64)):
            assert len(chunks) == count
            assert (chunks[0].start, chunks[-1].stop) == (0, total)
            assert all(one.stop == next_.start for one, next_ in pairwise(chunks))
            sizes = [chunk.stop - chunk.start for chunk in chunks]
            assert max(sizes) - min(sizes) <= step
            assert all(chunk.start % step == 0 for chunk in chunks)
    rows = heads.chunk_elements(torch.device("cuda")) // 151_936
    assert -(-16_384 // rows) == 19
