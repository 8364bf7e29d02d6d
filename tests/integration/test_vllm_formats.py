"""Test VLLMLocal in other formats than the trainer's: a float32 head, weights in fp8."""

from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.model_loader.reload.layerwise as layerwise

from lightning_rl.engines import Sampling
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.engines.vllm.forms import require_all_loaded
from lightning_rl.errors import IncompleteWeightsError
from tests.support.engine_checks import PROMPTS, generate, plain_model, scaled, true_logprobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="formats of the CPU build"),
]

SAMPLING = Sampling(max_tokens=30, min_tokens=30)


def gaps(engine, plain):
    """Return the gap of each token's logprob to the model in float32."""
    found = []
    for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, SAMPLING), strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, SAMPLING)
        found += [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
    return torch.tensor(found)


def hidden_and_logprobs(engine, prompt):
    """Return the head's input for each token of a completion, and the logprobs that came of it."""
    seen = []

    def listen(model):
        layer = model.logits_processor
        return layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].clone()))

    [listening] = engine._llm.apply_model(listen)
    (completion,) = generate(engine, [prompt], Sampling(max_tokens=30))
    listening.remove()
    return torch.cat(seen).double(), completion


@pytest.mark.parametrize("fp32", [False, True])
def test_a_float32_head_rounds_no_logits(vllm_in, weights, fp32):
    engine = vllm_in("bfloat16", **({"cast_lm_head_to_fp32": True} if fp32 else {}))
    engine.load_weights(weights.items(), 0)
    hidden, completion = hidden_and_logprobs(engine, PROMPTS[0])
    head = weights["lm_head.weight"].bfloat16().double()
    exact = (hidden @ head.T).log_softmax(-1)
    expected = [row[token] for row, token in zip(exact, completion.token_ids, strict=True)]
    worst = max(abs(a - float(b)) for a, b in zip(completion.logprobs, expected, strict=True))
    largest = float((hidden @ head.T).abs().max())
    if fp32:
        assert worst < 64 * 2**-23 * largest  # sums of 64 products in float32
    else:
        # A bfloat16 has 8 bits of mantissa; a logprob takes two logits.
        assert 2**-11 * largest < worst < 2 * 2**-8 * largest


def scales(engine):
    """Return the scales of all quantized layers."""

    def read(model):
        return {n: p.clone() for n, p in model.named_parameters() if n.endswith("weight_scale")}

    (found,) = engine._llm.apply_model(read)
    return found


def test_weights_are_pushed_to_an_engine_in_fp8(vllm_in, tiny_model, weights):
    """They are quantized anew with each push, and other weights stay beyond the tolerance."""
    engine = vllm_in("bfloat16", quantization="fp8_per_channel")
    plain = plain_model(tiny_model, weights)
    engine.load_weights(weights.items(), 0)
    own, first = gaps(engine, plain).mean(), scales(engine)
    assert len(first) == 2 * 4  # layers, and vLLM's linear layers in each
    engine.load_weights(scaled(weights, 2.0).items(), 1)
    second = scales(engine)
    assert all(torch.equal(second[name], 2 * scale) for name, scale in first.items())
    bound = logprob_tolerance(engine.precision, "float32")
    assert own < bound / 2
    assert gaps(engine, plain).mean() > 1.5 * bound
    engine.load_weights(weights.items(), 2)
    assert gaps(engine, plain).mean() == own


def test_where_vllm_noted_nothing_of_its_layers_every_parameter_counts(monkeypatch):
    def nothing(layer):
        return SimpleNamespace(restore_metadata=({}, {}))

    monkeypatch.setattr(layerwise, "get_layerwise_info", nothing)
    with pytest.raises(IncompleteWeightsError, match=r"left 1 of the engine's weights .*'bias'"):
        require_all_loaded(torch.nn.Linear(1, 1), {"weight"})
