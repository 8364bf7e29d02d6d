"""Test LoRA: what trains, what is pushed to engines, what is exported."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from lightning_rl import NF4, Int8
from lightning_rl.engines import TransformersEngine
from lightning_rl.errors import ConfigError
from lightning_rl.learn.lora_layers import largest_rank, merged_only
from lightning_rl.models.lora import LoRA
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from lightning_rl.module import PolicyModule
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.tiny_models import save_untied_llama
from tests.support.tolerances import distance, forward_additions, norm_rounding, scores_rounding

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 2, 9, 1]])


def trained(policy: Policy) -> Policy:
    """Change a policy as training does: every adapter does something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    return policy


@pytest.fixture(scope="module")
def untied_model(tiny_model, tmp_path_factory):
    """Return a random Llama with an output layer of its own."""
    directory = tmp_path_factory.mktemp("untied")
    save_untied_llama(directory, tiny_model)
    return directory


@pytest.fixture(params=["tied", "untied"])
def model(request, tiny_model, untied_model):
    return tiny_model if request.param == "tied" else untied_model


def logits(policy: Policy, model) -> torch.Tensor:
    """Return the adapted model's own forward: plain attention, adapters as separate layers."""
    policy.lm.set_attn_implementation("eager")
    with torch.no_grad():
        return policy.lm(input_ids=IDS, use_cache=False).logits


def test_nothing_changes_at_first(model, random_batch):
    with torch.no_grad():
        ours = Policy(str(model), lora=LoRA(rank=4))(random_batch(1)).logprobs
        plain = Policy(str(model))(random_batch(1)).logprobs
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def test_adapters_are_on_all_linear_layers_but_the_output(model):
    policy = Policy(str(model), lora=LoRA(rank=4))
    adapted = {name for name, m in policy.lm.named_modules() if hasattr(m, "get_delta_weight")}
    linear = {
        name.removesuffix(".base_layer")
        for name, module in policy.lm.named_modules()
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name
    }
    assert adapted == linear - {"lm_head"}
    assert len(adapted) == 7 * policy.lm.config.num_hidden_layers


@pytest.mark.parametrize("form", [None, NF4(), Int8()])
def test_only_adapters_train(tiny_model, train_on, random_batch, form):
    module = PolicyModule(
        str(tiny_model),
        lora=LoRA(rank=4, quantization=form),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
    module.configure_model()
    before = {name: p.detach().clone() for name, p in module.policy.named_parameters()}
    trainer = train_on(module, [random_batch(1), random_batch(2)])
    for name, parameter in module.policy.named_parameters():
        is_adapter = ".lora_" in name
        assert parameter.requires_grad is is_adapter, name
        assert torch.equal(parameter, before[name]) is not is_adapter, name
    optimized = sum(p.numel() for g in trainer.optimizers[0].param_groups for p in g["params"])
    assert optimized == sum(p.numel() for n, p in before.items() if ".lora_" in n)


def test_the_update_is_scaled_by_alpha_over_rank(tiny_model):
    policy = trained(Policy(str(tiny_model), lora=LoRA(rank=4, alpha=6.0)))
    layer = policy.lm.base_model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = dict(policy.named_weights())["model.layers.0.self_attn.q_proj.weight"]
    expected = layer.base_layer.weight.double() + 1.5 * b.double() @ a.double()
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=1e-6)


def test_merged_layers_are_the_adapted_ones_in_float64(model):
    policy = trained(Policy(str(model), lora=LoRA(rank=4))).double()
    weights = dict(policy.named_weights())
    adapted = [(n, m) for n, m in policy.lm.named_modules() if hasattr(m, "get_delta_weight")]
    for name, module in adapted:
        x = torch.linspace(-1, 1, module.in_features, dtype=torch.double)
        merged = torch.nn.functional.linear(x, weights[f"{name}.weight"], module.bias)
        torch.testing.assert_close(merged, module(x), rtol=0, atol=1e-12)
        assert not torch.allclose(merged, module.base_layer(x), atol=1e-3)


def test_merged_weights_are_the_adapted_model_under_the_base_models_names(model):
    policy = trained(Policy(str(model), lora=LoRA(rank=4)))
    plain = AutoModelForCausalLM.from_pretrained(model)
    start = logits(Policy(str(model)), model)
    weights = dict(policy.named_weights())
    assert list(weights) == list(plain.state_dict())
    assert not any(weight.requires_grad for weight in weights.values())
    plain.load_state_dict(weights)
    adapted = logits(policy, model)
    with torch.no_grad():
        merged = plain(input_ids=IDS).logits
    # Layer by layer they are equal to 1e-12 in float64 (above); this is float32's rounding.
    assert distance(merged, adapted) < norm_rounding(forward_additions(policy.lm.config))
    assert float((adapted - start).abs().max()) > 0.1


def test_packed_scores_are_the_merged_models(model, random_batch):
    policy = trained(Policy(str(model), lora=LoRA(rank=4)))
    merged = Policy(str(model))
    merged.lm.load_state_dict(dict(policy.named_weights()))
    with torch.no_grad():
        ours, theirs = policy(random_batch(2)), merged(random_batch(2))
    bound = scores_rounding(policy.lm.config, theirs.logprobs)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=bound)


def test_merging_leaves_the_policy_alone(tiny_model, random_batch):
    policy = trained(Policy(str(tiny_model), lora=LoRA(rank=4)))
    before = {name: p.clone() for name, p in policy.lm.state_dict().items()}
    list(policy.named_weights())
    for name, weight in policy.lm.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_the_export_loads_in_plain_transformers(model, tmp_path):
    policy = trained(Policy(str(model), lora=LoRA(rank=4)))
    policy.save_pretrained(tmp_path)
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        ours = exported(input_ids=IDS).logits
    torch.testing.assert_close(
        ours, logits(policy, model), rtol=0, atol=scores_rounding(policy.lm.config, ours)
    )
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 1
    # Nothing of peft is left: the policy itself starts from it again.
    again = dict(Policy(str(tmp_path)).named_weights())
    for name, weight in policy.named_weights():
        assert torch.equal(again[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_names_its_dtype(tiny_model, tmp_path, dtype):
    Policy(str(tiny_model), lora=LoRA(rank=4)).to(dtype).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype


def test_an_engine_takes_the_merged_weights(tiny_model, tmp_path):
    save_skeleton(str(tiny_model), tmp_path)
    engine = TransformersEngine(device="cpu")
    engine.start(tmp_path)
    policy = trained(Policy(str(tiny_model), lora=LoRA(rank=4)))
    engine.load_weights(policy.named_weights(), 1)
    with torch.no_grad():
        ours = engine._lm(input_ids=IDS).logits
    torch.testing.assert_close(
        ours, logits(policy, tiny_model), rtol=0, atol=scores_rounding(tiny_model, ours)
    )


def test_chosen_layers_only(tiny_model):
    policy = Policy(str(tiny_model), lora=LoRA(rank=2, target_modules=["q_proj", "v_proj"]))
    adapted = {n.split(".")[-1] for n, m in policy.lm.named_modules() if hasattr(m, "lora_A")}
    assert adapted == {"q_proj", "v_proj"}


def test_layers_that_are_not_there_are_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"lora.target_modules=\['nowhere'\]"):
        Policy(str(tiny_model), lora=LoRA(target_modules=["nowhere"]))


def test_an_adapter_on_the_output_layer_is_refused(tiny_model, untied_model):
    """Scoring reads that layer's weight without it, so engine and trainer would differ."""
    for model, module in ((untied_model, "lm_head"), (tiny_model, "embed_tokens")):
        with pytest.raises(ConfigError, match=rf"\['{module}'\] adapts the output layer"):
            Policy(str(model), lora=LoRA(target_modules=[module]))
    Policy(str(untied_model), lora=LoRA(target_modules=["embed_tokens"]))  # not tied: fine


@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_base_and_adapters_by_themselves_are_the_merged_weights(untied_model, target):
    """A and B as they are multiplied, with the scale of 6 / 4 in B, also of what is transposed."""
    lora = LoRA(rank=4, alpha=6.0, target_modules=[target])
    policy = trained(Policy(str(untied_model), lora=lora)).double()
    adapters = dict(policy.named_adapter_weights())
    layer = "model.layers.0.self_attn.q_proj" if target == "q_proj" else "model.embed_tokens"
    assert set(adapters) == {f"{layer}.lora_A", f"{layer}.lora_B"}
    a, b = adapters[f"{layer}.lora_A"], adapters[f"{layer}.lora_B"]
    merged, base = dict(policy.named_weights()), dict(policy.named_base_weights())
    assert a.shape == (4, 32)
    assert merged.keys() == base.keys()
    torch.testing.assert_close(merged.pop(f"{layer}.weight"), base.pop(f"{layer}.weight") + b @ a)
    assert all(torch.equal(merged[name], weight) for name, weight in base.items())


def test_a_policy_without_lora_has_no_adapters(tiny_model):
    with pytest.raises(ConfigError, match="needs a LoRA policy; set lora"):
        Policy(str(tiny_model)).named_adapter_weights()


@pytest.mark.parametrize("kind", [MemoryTransport, CheckpointTransport])
def test_an_engine_in_this_process_takes_adapters(tiny_model, tmp_path, kind):
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model)
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, alpha=8.0))
    place = {"directory": str(tmp_path)} if kind is CheckpointTransport else {}
    transport = kind(**place, adapters_only=True)
    transport.connect(engine)
    for version in (0, 1):
        names = [name for name, _ in transport.weights_of(policy)]
        assert any(".lora_" not in name for name in names) == (version == 0)
        transport.push(transport.weights_of(policy), version)
        assert engine.version == version
        held = engine._lm.state_dict()
        for name, weight in policy.named_weights():
            assert torch.equal(held[name], weight), name
        trained(policy)
    files = {file.name.partition("-")[0] for file in tmp_path.iterdir()}
    assert files == ({"adapters"} if kind is CheckpointTransport else set())
    transport.close()


def test_what_only_a_merge_can_do(tiny_model, untied_model):
    def why(model=tiny_model, **options):
        return merged_only(LoRA(rank=4, **options), str(model), Loading())

    assert why() is None
    assert why(target_modules=r".*layers\.1\..*(q|up)_proj") is None
    assert why(options={"use_rslora": True, "rank_pattern": {"q_proj": 9}}) is None
    assert "DoRA" in why(options={"use_dora": True})
    assert "modules_to_save" in why(options={"modules_to_save": ["norm"]})
    assert "bias" in why(options={"bias": "all"})
    assert "'model.embed_tokens', a Embedding" in why(untied_model, target_modules=["embed_tokens"])
    assert largest_rank(LoRA(rank=4, options={"rank_pattern": {"q_proj": 9}})) == 9
