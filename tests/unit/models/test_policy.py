"""Packed scoring is the plain Hugging Face forward, rollout by rollout: values and gradients."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import split_micro_batches
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention import batches as attention_batches, packed as attention
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import load_config
from tests.support.architectures import scored_alone
from tests.support.doubles import EXACT
from tests.support.tolerances import distance, scores_rounding


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return Policy(str(tiny_model))


@pytest.fixture(scope="module")
def plain(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="sdpa")


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 6),
    temperature=st.sampled_from([1.0, 0.7, 1.4]),
)
def test_logprobs_and_entropy_equal_a_plain_forward(
    policy, plain, random_rollouts, seed, groups, temperature
):
    rollouts = random_rollouts(seed, groups=groups, temperature=temperature)
    with torch.no_grad():
        scores = policy(pack_rollouts(rollouts))
        logprobs, entropy = scored_alone(plain, rollouts)
    bound = scores_rounding(policy.lm.config, logprobs)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=0, atol=bound)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=bound)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_gradients_equal_those_of_a_plain_forward(tiny_model, random_rollouts, in_double, seed):
    rollouts = random_rollouts(seed, temperature=0.75)  # which batches, in float32, hold exactly
    policy = Policy(str(tiny_model)).double()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    scores = policy(pack_rollouts(rollouts))
    credit = torch.linspace(-1, 2, len(scores.logprobs))
    ours = gradients(policy.lm, (scores.logprobs * credit).sum())
    theirs = gradients(plain, (scored_alone(plain, rollouts)[0] * credit).sum())
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert distance(ours[name], theirs[name]) < EXACT, name


def test_live_tokens_are_the_loss_mask_in_order(policy, random_batch):
    batch = random_batch(0)
    assert torch.equal(policy(batch).live, batch["tokens", "loss_mask"].nonzero().squeeze(1))


@pytest.mark.parametrize("budget", [1, 20, 60, 10_000])
def test_scores_do_not_depend_on_the_micro_batch_budget(policy, random_batch, budget):
    batch = random_batch(7, groups=6)
    with torch.no_grad():
        whole = policy(batch).logprobs
        by_token = torch.zeros(len(batch["tokens"]))
        by_token[batch["tokens", "loss_mask"]] = whole
        for rows in split_micro_batches(batch, budget):
            micro_batch = select(batch, rows)
            starts = (batch["rollouts", "length"].cumsum(0) - batch["rollouts", "length"])[rows]
            lengths = batch["rollouts", "length"][rows]
            spans = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
            expected = by_token[torch.cat(spans)][micro_batch["tokens", "loss_mask"]]
            bound = scores_rounding(policy.lm.config, expected)
            torch.testing.assert_close(policy(micro_batch).logprobs, expected, rtol=0, atol=bound)


def test_scores_do_not_depend_on_the_order_of_rollouts(policy, random_rollouts):
    rollouts = random_rollouts(8, groups=5)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0)).tolist()
    counts = [sum(r.loss_mask) for r in rollouts]
    with torch.no_grad():
        scores = policy(pack_rollouts(rollouts)).logprobs.split(counts)
        shuffled = policy(pack_rollouts([rollouts[i] for i in order])).logprobs
    expected = torch.cat([scores[i] for i in order])
    bound = scores_rounding(policy.lm.config, expected)
    torch.testing.assert_close(shuffled, expected, rtol=0, atol=bound)


def test_scores_do_not_depend_on_how_segments_are_bucketed(monkeypatch, policy, random_batch):
    batch = random_batch(9, groups=6)
    with torch.no_grad():
        few = policy(batch).logprobs
        count = len(attention.build_layout(batch).batches.parts)
        monkeypatch.setattr(attention_batches, "MAX_SCORES", 40)
        many = policy(batch).logprobs
        assert len(attention.build_layout(batch).batches.parts) > count
    bound = scores_rounding(policy.lm.config, many)
    torch.testing.assert_close(few, many, rtol=0, atol=bound)


def test_a_shared_prompt_is_computed_once(make_rollout):
    rollouts = [make_rollout([3, 4, 5], [6, 7, 1]), make_rollout([3, 4, 5], [8, 1])]
    layout = attention.build_layout(pack_rollouts(rollouts))
    # The prompt, then each completion less its last token, at its true position.
    assert layout.input_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert layout.predictors.tolist() == [2, 3, 4, 2, 5]


def test_only_one_token_completions(policy, plain, make_rollout):
    rollouts = [make_rollout([3, 4], [5]), make_rollout([3, 4], [6]), make_rollout([7], [1])]
    with torch.no_grad():
        ours, theirs = policy(pack_rollouts(rollouts)).logprobs, scored_alone(plain, rollouts)[0]
    bound = scores_rounding(policy.lm.config, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def layer_runs(policy: Policy, batch) -> tuple[int, dict[str, Tensor]]:
    runs = []
    # The layer's first step: recomputation stops as soon as it has what backward needs.
    first_step = policy.lm.base_model.layers[0].input_layernorm
    handle = first_step.register_forward_pre_hook(lambda *_: runs.append(1))
    grads = gradients(policy.lm, policy(batch).logprobs.sum())
    handle.remove()
    return len(runs), grads


def test_gradient_checkpointing_recomputes_and_changes_nothing(tiny_model, random_batch):
    batch = random_batch(3)
    plainly, expected = layer_runs(Policy(str(tiny_model)), batch)
    again, grads = layer_runs(
        Policy(str(tiny_model), loading={"gradient_checkpointing": True}), batch
    )
    assert (plainly, again) == (1, 2)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name])


def test_adapters_have_the_same_gradients_with_recomputed_layers(tiny_model, random_batch):
    """The base is frozen, so that nothing that enters the first layer has a gradient."""
    batch, grads = random_batch(3), []
    for recomputes in (False, True):
        policy = Policy(
            str(tiny_model), lora=LoRA(rank=2), loading={"gradient_checkpointing": recomputes}
        )
        generator = torch.Generator().manual_seed(1)
        adapters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        for parameter in adapters.values():
            parameter.data.normal_(std=0.1, generator=generator)
        policy(batch).logprobs.sum().backward()
        grads.append({name: parameter.grad for name, parameter in adapters.items()})
    for name, expected in grads[0].items():
        assert expected.any(), name
        torch.testing.assert_close(grads[1][name], expected)


def test_random_init_takes_only_the_configuration(tiny_model, policy):
    torch.manual_seed(1)  # the fixture was made with 0
    fresh = Policy(str(tiny_model), loading={"random_init": True})
    name, weight = next(iter(fresh.named_weights()))
    mine = dict(policy.named_weights())[name]
    assert weight.shape == mine.shape
    assert not torch.equal(weight, mine)


def test_named_weights_always_hold_the_head(policy):
    weights = dict(policy.named_weights())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert set(weights) >= {name for name, _ in policy.lm.named_parameters()}


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*there is no such directory"):
        Policy(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty.*a file in it is missing or damaged"):
        Policy(str(tmp_path / "empty"))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_policy_leaves_the_number_of_threads_as_it_is(tiny_model, random_batch, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Policy(str(tiny_model)).score(random_batch(0), "logprobs", 1000)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("model", ["runs/no/model", "./nowhere", "made/nowhere"])
def test_a_missing_directory_is_refused_before_any_hub_is_asked(monkeypatch, tmp_path, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match=r"there is no such directory \(working directory"):
        Policy(model)


def test_a_configuration_that_names_a_kernel_of_the_hubs_is_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"_attn_implementation": "user/kernel"}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"names a kernel of the hub's, _attn_implem.*'user/ker"):
        load_config(str(folder))
