"""LoRA with peft's further options: what is trained is what engines and exports get, or refused."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.errors import ConfigError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import BaseReference
from lightning_rl.module import PolicyModule

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 2, 9, 1]])


def trained(policy: Policy) -> Policy:
    """Change a policy as training does: all that may change has changed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                noise = torch.empty_like(parameter).normal_(std=0.05, generator=generator)
                parameter.add_(noise)
    return policy


OPTIONS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["down_proj"]},
    "norm saved": {"modules_to_save": ["norm"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "bias": {"bias": "all"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "random": {"init_lora_weights": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_merged_weights_are_the_adapted_model(tiny_model, options):
    layers = ["q_proj", "o_proj"] if "layers_to_transform" in options else ["all-linear"]
    policy = trained(Policy(str(tiny_model), lora=LoRA(4, 32.0, layers, options)))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    weights = {name: weight.clone() for name, weight in policy.named_weights()}
    assert list(weights) == list(plain.state_dict())
    policy.lm.set_attn_implementation("eager")
    with torch.no_grad():
        start = plain(input_ids=IDS).logits
        plain.load_state_dict(weights)
        merged = plain(input_ids=IDS).logits
        adapted = policy.lm(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-4)
    assert float((merged - start).abs().max()) > 1e-2
    # Merging changes nothing in the policy.
    again = dict(policy.named_weights())
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_rslora_scales_by_the_root_of_the_rank(tiny_model):
    lora = LoRA(rank=4, alpha=6.0, options={"use_rslora": True})
    policy = trained(Policy(str(tiny_model), lora=lora))
    layer = policy.lm.base_model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = dict(policy.named_weights())["model.layers.0.self_attn.q_proj.weight"]
    expected = layer.base_layer.weight + 3.0 * b @ a  # 6 / sqrt(4)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)


def test_modules_to_save_train_and_nothing_else_beside_adapters(tiny_model, train_on, random_batch):
    module = PolicyModule(
        str(tiny_model),
        lora=LoRA(rank=4, options={"modules_to_save": ["norm"]}),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
    module.configure_model()
    before = {name: p.detach().clone() for name, p in module.policy.named_parameters()}
    train_on(module, [random_batch(1), random_batch(2)])
    for name, parameter in module.policy.named_parameters():
        trains = ".lora_" in name or name.endswith(".norm.weight")
        assert torch.equal(parameter, before[name]) is not trains, name


def test_a_peft_configuration_is_taken_as_it_is(tiny_model):
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], use_rslora=True,
        modules_to_save=["norm"], task_type="CAUSAL_LM",
    )  # fmt: skip
    options = {"use_rslora": True, "modules_to_save": ["norm"]}
    expected = LoRA(4, 8.0, ["q_proj", "v_proj"], options)
    assert PolicyModule(str(tiny_model), lora=config).lora == expected
    assert Policy(str(tiny_model), lora=config).lora == expected
    everything = peft.LoraConfig(target_modules="all-linear")
    assert LoRA.from_peft(everything) == LoRA(8, 8.0)
    by_name = LoRA.from_peft(peft.LoraConfig(target_modules=r".*\.0\..*q_proj"))
    policy = Policy(str(tiny_model), lora=by_name)
    adapted = [n for n, m in policy.lm.named_modules() if hasattr(m, "get_delta_weight")]
    assert adapted == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout=0\.1: .*at random"),
        ({"r": 4}, r"options\.r=4: set lora\.rank"),
        ({"lora_bias": True}, r"lora_bias=True cannot be merged"),
        ({"alora_invocation_tokens": [3]}, "cannot be merged"),
        ({"use_rslorra": True}, "is no option of peft"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the model's own weights"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        LoRA(options=options)


def test_other_methods_and_missing_modules_are_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"lora=IA3Config: only peft\.LoraConfig"):
        PolicyModule(str(tiny_model), lora=peft.IA3Config())
    with pytest.raises(ConfigError, match=r"target_modules=None\) leaves"):
        LoRA.from_peft(peft.LoraConfig())
    with pytest.raises(ConfigError, match="modules_to_save has 'nrm'"):
        Policy(str(tiny_model), lora=LoRA(options={"modules_to_save": ["nrm"]}))


@pytest.mark.parametrize("options", [{"modules_to_save": ["norm"]}, {"bias": "all"}])
def test_what_needs_an_unchanged_base_is_refused(tiny_model, options):
    policy = Policy(str(tiny_model), lora=LoRA(options=options))
    with pytest.raises(ConfigError, match="use FrozenReference"):
        BaseReference().configure(policy)
    with pytest.raises(ConfigError, match="leave out adapters_only"):
        policy.named_adapter_weights()


def test_dora_is_no_sum_so_its_adapters_are_not_pushed_alone(tiny_model):
    policy = Policy(str(tiny_model), lora=LoRA(options={"use_dora": True}))
    with pytest.raises(ConfigError, match=r"use_dora=True\); leave out adapters_only"):
        policy.named_adapter_weights()
