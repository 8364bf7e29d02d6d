"""A LoRA on a packed base: vLLM has the values that the trainer unpacks, and a run keeps it."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_rl import NF4, HFExport, Int8, LoRA, MemoryTransport, VLLMLocal, WeightSync
from lightning_rl.engines import Sampling
from lightning_rl.learn.lora_layers import largest_rank
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import quantized_layers
from lightning_rl.sync.base import push
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    generate,
    plain_model,
    train_adapters,
    true_logprobs,
)
from tests.support.lots import LotEngine
from tests.support.small_run import SaveAfter, data_module, grpo, trainer_of
from tests.support.tolerances import bfloat16_rounding

FIXED = Sampling(max_tokens=12, min_tokens=12, temperature=0.8)


@pytest.fixture(scope="module")
def local(skeleton):
    engine = VLLMLocal(max_model_len=128, kv_cache_gb=0.05, adapters="apart", dtype="float32")
    engine.configure_lora(largest_rank(LoRA(rank=9)), lambda: None)
    engine.start(skeleton)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("form", [NF4(), Int8()])
def test_vllm_writes_what_the_trainer_computes(tiny_model, local, form):
    policy = Policy(str(tiny_model), lora=LoRA(rank=9, quantization=form))
    transport = MemoryTransport()
    local.has_base = False  # of another policy
    transport.connect(local)
    for version in (1, 2):
        plain = plain_model(tiny_model, train_adapters(policy, seed=version))
        push(transport, local, policy, version)
        for prompt, completion in zip(PROMPTS, generate(local, PROMPTS, FIXED), strict=True):
            expected = true_logprobs(plain, prompt, completion.token_ids, FIXED)
            assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
    transport.close()


def fitted(model, path, form, *callbacks):
    module = grpo(model, lora=LoRA(rank=4, quantization=form))
    torch.manual_seed(0)  # of the adapters' first weights
    trainer = trainer_of(path, [WeightSync(), *callbacks], precision="bf16-true")
    data = data_module(iterations_per_epoch=3, engine=LotEngine(device="cpu"), evaluation=None)
    trainer.fit(module, data)
    return module, trainer


@pytest.mark.parametrize("form", [NF4(), Int8()])
def test_a_run_in_bfloat16_keeps_what_is_packed(tiny_model, tmp_path, form):
    """A checkpoint holds it, so that a model's files, or kernels, may change meanwhile."""
    saved = tmp_path / "saved.ckpt"
    export = HFExport(str(tmp_path / "whole"), merge_adapters=True)
    packed = Policy(str(tiny_model), lora=LoRA(quantization=form)).lm
    module, trainer = fitted(tiny_model, tmp_path, form, SaveAfter(2, saved), export)
    gap = float(trainer.callback_metrics["rollout/logprob_gap_max"])
    assert gap < bfloat16_rounding(tiny_model, magnitude=4.0)
    layers = quantized_layers(module.loaded_policy.lm)
    state = torch.load(saved, weights_only=True)["state_dict"]
    for name, layer in quantized_layers(packed).items():
        for part, tensor in layer.parts.items():
            assert torch.equal(layers[name].parts[part], tensor)
            assert torch.equal(state[f"policy.lm.{name}.{part}"], tensor)
        assert layers[name].weight.dtype == torch.bfloat16
    exported = load_file(tmp_path / "whole" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
