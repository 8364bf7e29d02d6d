"""Mixtures of experts: names of their weights, from files to engines and back; packed scores."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, IncompleteWeightsError
from lightning_rl.models.export import ModelExport
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.stacked import FileNames
from lightning_rl.run.digest import digests
from tests.support.engine_checks import generate, true_logprobs
from tests.support.mixtures import KINDS, SIGMOIDS, saved_mixture
from tests.support.tolerances import scores_rounding

PROMPTS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], [3, 4, 2]]


@pytest.fixture(scope="module", params=[*KINDS, *SIGMOIDS])
def mixture(request, tmp_path_factory):
    """Return a random mixture of this kind, and its tokenizer."""
    return saved_mixture(request.param, tmp_path_factory.mktemp(request.param))


def in_files(directory):
    return load_file(directory / "model.safetensors")


def test_weights_have_the_names_of_files(mixture):
    named, files = dict(Policy(str(mixture)).named_weights()), in_files(mixture)
    assert named.keys() == files.keys()
    assert sum(".experts.0." in name for name in named) == 2 * 3  # two layers, three matrices
    assert all(torch.equal(named[name], weight) for name, weight in files.items())


def test_stacks_are_not_copied(mixture):
    lm = Policy(str(mixture)).lm
    stacks = {name: w for name, w in lm.state_dict().items() if name.endswith(".gate_up_proj")}
    assert len(stacks) == 2
    for stack in stacks.items():
        for _, view in FileNames(lm).each([stack]):
            view.fill_(7.0)
    assert all(bool((weight == 7.0).all()) for weight in stacks.values())


def test_an_engine_holds_what_was_pushed_and_computes_with_it(mixture):
    engine = TransformersEngine(device="cpu", dtype="float32")
    engine.start(mixture)
    weights = dict(Policy(str(mixture)).named_weights())
    halved = {name: weight * 0.5 for name, weight in weights.items()}
    for version, pushed in enumerate((weights, halved)):
        engine.load_weights(pushed.items(), version)
        [held] = engine.held_digests(list(pushed))
        assert held.digests == digests(pushed.items())
    sampling = Sampling(max_tokens=8)
    plain = AutoModelForCausalLM.from_pretrained(mixture)
    for parameter in plain.parameters():
        parameter.data *= 0.5
    for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        bound = scores_rounding(plain.config, torch.tensor(expected))
        assert completion.logprobs == pytest.approx(expected, abs=bound)
    left_out = [(n, w) for n, w in weights.items() if ".experts.1." not in n]
    with pytest.raises(IncompleteWeightsError, match=r"lacks 6 .*experts\.1\."):
        engine.load_weights(left_out, 2)
    engine.close()


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_exports_load_to_the_same_logits(mixture, tmp_path, lora, copied):
    policy = Policy(str(mixture), lora=lora)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    export = ModelExport(policy, copied=copied)
    export.write(tmp_path)
    files = in_files(tmp_path)
    assert files.keys() == in_files(mixture).keys()
    for name, weight in policy.named_weights():
        assert torch.equal(files[name], weight)
    back, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor([[7, 4, 6, 5, 3]])
    ours, theirs = (dict(one.named_weights()) for one in (policy, Policy(str(tmp_path))))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    policy.lm.set_attn_implementation("sdpa")
    bound = scores_rounding(back.config, back(ids).logits)
    torch.testing.assert_close(back(ids).logits, policy.lm(ids).logits, rtol=0, atol=bound)


@pytest.mark.parametrize("names", [["gate_proj", "up_proj", "down_proj"], ["gate"]])
def test_adapters_of_experts_are_refused(tmp_path, names):
    model = saved_mixture("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match=r"lora\.target_modules.*name layers of attention"):
        Policy(str(model), lora=LoRA(target_modules=names))


def test_all_linear_adapts_attention(tmp_path):
    policy = Policy(str(saved_mixture("qwen3_moe", tmp_path)), lora=LoRA(rank=2))
    adapted = {name.split(".")[-2] for name, _ in policy.named_adapter_weights()}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_scores_do_not_depend_on_order_or_micro_batches(mixture, random_rollouts):
    """A router of random weights is never of two minds in float32."""
    policy, batch = Policy(str(mixture)), pack_rollouts(random_rollouts(0))
    together = policy.score(batch.clone(), "together", 10_000)["tokens", "together"]
    apart = policy.score(batch.clone(), "apart", 8)["tokens", "apart"]
    bound = scores_rounding(policy.lm.config, together)
    torch.testing.assert_close(apart, together, rtol=0, atol=bound)
    order = torch.arange(len(batch["rollouts"])).flip(0)
    turned = policy.score(select(batch, order), "turned", 10_000)
    back = select(turned, order)["tokens", "turned"]
    torch.testing.assert_close(back, together, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_agree_on_the_same_weights(mixture, dtype, make_rollout):
    """A router may choose otherwise in bfloat16; the mean gap of other weights is above 2."""
    engine = TransformersEngine(device="cpu", dtype=dtype)
    engine.start(mixture)
    policy = Policy(str(mixture))
    engine.load_weights(policy.named_weights(), 0)
    completions = generate(engine, PROMPTS, Sampling(max_tokens=8))
    rollouts = [
        make_rollout(prompt, one.token_ids, logprobs=one.logprobs)
        for prompt, one in zip(PROMPTS, completions, strict=True)
    ]
    batch = pack_rollouts(rollouts)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        scored = policy.score(batch, "ours", 10_000)["tokens"]
    gap = (scored["ours"] - scored["rollout_logprobs"])[scored["loss_mask"]].abs()
    assert float(gap.mean()) < (1e-4 if dtype == "float32" else 0.5)
    engine.close()
