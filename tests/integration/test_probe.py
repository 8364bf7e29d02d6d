"""Test the probe after a sync, with a real vLLM in float32 and in bfloat16: what it finds."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.errors import StaleWeightsError
from lightning_rl.learn.probe import probe_again, probe_gap, require_agreement
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt

# vLLM caches blocks of 32 tokens.
PROMPTS = [Prompt(str(n), "", [3 + (n * i + i // 7) % 10 for i in range(70)]) for n in range(1, 5)]


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def engine(request, vllm_in):
    return vllm_in(request.param)


@pytest.fixture(scope="module")
def others(tiny_model):
    """Return weights of a policy that has learned other things."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model))
    return {name: weight.detach() for name, weight in lm.state_dict().items()}


def verify(engine, policy):
    """Probe as WeightSync does, under the engine's precision, and return the first probe's gap."""
    bf16 = engine.dtype == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        gap = probe_gap(engine, policy, PROMPTS, 1.0)
        again = partial(probe_again, engine, policy, PROMPTS, 1.0)
        require_agreement(gap, again, engine.version, None, engine.dtype, engine.dtype)
    return gap


def policy_of(tiny_model, weights):
    policy = Policy(str(tiny_model))
    policy.lm.load_state_dict(weights)
    return policy


def test_the_same_weights_pass(tiny_model, weights, engine):
    engine.load_weights(weights.items(), 0)
    policy = policy_of(tiny_model, weights)
    first = verify(engine, policy)
    assert first.value < (1e-4 if engine.dtype == "float32" else 0.25)
    # Nothing in the engine has changed by it, though it now finds the prompts in its cache.
    assert verify(engine, policy).value < (1e-4 if engine.dtype == "float32" else 0.25)


@pytest.mark.parametrize("part", ["model.layers.1.", "model.layers.0.self_attn.", "model.embed"])
def test_a_stale_layer_is_found_at_once(tiny_model, weights, others, engine, part):
    stale = {name: weights[name] if name.startswith(part) else others[name] for name in weights}
    if part == "model.embed":  # tied, but the engine's head is a weight of its own on CPUs
        stale["lm_head.weight"] = others["lm_head.weight"]
    engine.load_weights(stale.items(), 1)
    with pytest.raises(StaleWeightsError, match="after the sync of version 1, engine and trainer"):
        verify(engine, policy_of(tiny_model, others))


def test_a_stale_cache_is_found_at_once(monkeypatch, tiny_model, weights, others, engine):
    engine.load_weights(weights.items(), 0)
    verify(engine, policy_of(tiny_model, weights))  # fills it
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
    engine.load_weights(others.items(), 1)
    with pytest.raises(StaleWeightsError, match="or a stale cache"):
        verify(engine, policy_of(tiny_model, others))


def test_weights_one_small_update_old_are_not_found(tiny_model, weights, engine):
    """1e-6 on each weight, as AdamW moves it in a step: less than rounding. Versions tell it."""
    engine.load_weights(weights.items(), 1)
    moved = {
        name: weight + 1e-6 * torch.randn_like(weight).sign() for name, weight in weights.items()
    }
    moved["lm_head.weight"] = moved["model.embed_tokens.weight"]
    verify(engine, policy_of(tiny_model, moved))
