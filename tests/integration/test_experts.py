"""Mixtures of experts in vLLM: what is pushed is what it computes with."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.models.policy import Policy, save_skeleton
from tests.support.engine_checks import PROMPTS, ROUNDING, generate, true_logprobs
from tests.support.mixtures import KINDS, saved_mixture


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_computes_with_pushed_experts(kind, tmp_path):
    """After a first push, and a second: on CPUs vLLM packs experts by itself only at its start."""
    model, skeleton = saved_mixture(kind, tmp_path / "model"), tmp_path / "skeleton"
    save_skeleton(str(model), skeleton)
    weights = dict(Policy(str(model)).named_weights())
    plain = AutoModelForCausalLM.from_pretrained(model)
    engine = VLLMLocal(max_model_len=128, kv_cache_gb=0.05, dtype="float32")
    engine.start(skeleton)
    try:
        sampling = Sampling(max_tokens=8)
        for version, factor in enumerate((1.0, 0.8)):
            engine.load_weights(((n, w * factor) for n, w in weights.items()), version)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter *= factor
            for prompt, one in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
                expected = true_logprobs(plain, prompt, one.token_ids, sampling)
                assert one.logprobs == pytest.approx(expected, abs=ROUNDING)
        [held] = engine.holdings(list(weights))
        unread = {name for name in weights if ".experts." in name}
        assert held.unread.keys() == unread
        assert held.digests.keys() == weights.keys() - unread
    finally:
        engine.close()
