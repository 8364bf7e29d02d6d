"""Test what holds for every architecture: scores, engines, exports, resumed runs and adapters.

Slow: sixty models, each loaded, trained, exported, resumed and sampled from.
"""

import asyncio
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling, TransformersEngine, VLLMLocal
from lightning_rl.errors import ConfigError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.stacked import FileNames
from lightning_rl.run.loop.background import run_async
from tests.support.architectures import own_scores, policy_of
from tests.support.families import ARCHITECTURES
from tests.support.tolerances import distance

CLOSE = 1e-9
"""Relatively, in float64, of two ways to compute one number; a token too many shows at 1e-2."""
SINGLE = 1e-4
"""In float32, after weights were rounded to it; an adapter that is left out shows at 1e-2."""
STEPS_APART = {"nemotron_h": 1e-3}
"""The distance of transformers' cached steps from its whole pass, where there is one in float64."""
PROMPTS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], [3, 4, 2]]
SAMPLING = Sampling(max_tokens=6, temperature=0.75)

TRAINED = [name for name, one in ARCHITECTURES.items() if one.layout != "refused"]
REFUSED = [name for name, one in ARCHITECTURES.items() if one.layout == "refused"]
BY_VLLM = [name for name, one in ARCHITECTURES.items() if one.vllm]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda name: ARCHITECTURES[name].save(tmp_path_factory.mktemp(name) / "model"))


@pytest.fixture(scope="module", params=TRAINED)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def model(architecture, folder_of):
    return folder_of(architecture)


def in_float64(lm):
    """Cast the model to float64; products of many experts at a time know no float64."""
    lm.set_experts_implementation("eager")
    return lm.double()


def double(policy):
    in_float64(policy.lm)
    return policy.double()


def own_model(folder):
    """Return transformers' model in float64, with attention as its authors wrote it."""
    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return in_float64(lm)


def trained_steps(policy, *batches, optimizer=None, lr=0.01):
    """Take a step of AdamW on each batch; return the optimizer."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=lr, foreach=False)
    for batch in batches:
        optimizer.zero_grad()
        policy(batch).logprobs.square().mean().backward()
        optimizer.step()
    return optimizer


def test_scores_and_gradients_are_the_models_own(architecture, model, random_rollouts, in_double):
    rollouts = random_rollouts(0, temperature=0.75)
    policy, lm = double(policy_of(model)), own_model(model)
    assert policy.body_pass.packed == (ARCHITECTURES[architecture].layout == "packed")
    ours, theirs = policy(pack_rollouts(rollouts)).logprobs, own_scores(lm, rollouts)
    assert distance(ours, theirs) < CLOSE
    ours.square().sum().backward()
    theirs.square().sum().backward()
    expected = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    # Some (of key biases) are zero but for rounding: they are held to the size of all.
    size = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        gap = (policy.lm.get_parameter(name).grad - gradient).norm()
        assert gap < CLOSE * (gradient.norm() + size), name
    names = dict(FileNames(lm).each(lm.state_dict().items()))
    assert dict(policy.named_weights()).keys() == names.keys()


def test_the_engine_writes_what_the_trainer_scores(
    architecture, model, tmp_path, make_rollout, in_double
):
    policy, engine = double(policy_of(model)), TransformersEngine(device="cpu")
    save_skeleton(str(model), tmp_path)
    if not ARCHITECTURES[architecture].engine:
        with pytest.raises(ConfigError, match="TransformersEngine cannot add and remove rows"):
            engine.start(tmp_path)
        return
    engine.start(tmp_path)
    in_float64(engine._lm)
    engine.load_weights(policy.named_weights(), 0)
    written, scored = both(policy, engine, make_rollout, asyncio.run)
    engine.close()
    assert distance(scored, written) < STEPS_APART.get(architecture, CLOSE)


@pytest.mark.parametrize("name", BY_VLLM)
def test_vllm_writes_what_the_trainer_scores(name, folder_of, tmp_path, make_rollout):
    policy = policy_of(folder_of(name))
    engine = VLLMLocal("float32", max_model_len=64, kv_cache_gb=0.05)
    save_skeleton(policy.model, tmp_path)
    engine.start(tmp_path)
    try:
        engine.load_weights(policy.named_weights(), 0)
        written, scored = both(policy, engine, make_rollout, run_async)
    finally:
        engine.close()
        # vLLM makes a process group for experts only if a process's first model has some.
        import_module("vllm.distributed.parallel_state").destroy_model_parallel()
    assert distance(scored, written) < 1e-3  # of sums in float32, in another order


def both(policy, engine, make_rollout, run):
    """Return the logprobs of what an engine writes, and as the policy scores it."""

    async def write():
        asked = (engine.generate(p, SAMPLING, seed) for seed, p in enumerate(PROMPTS))
        return await asyncio.gather(*asked)

    completions = run(write())
    rollouts = [
        make_rollout(prompt, c.token_ids, group_id=str(i), sampling=SAMPLING.distribution)
        for i, (prompt, c) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    with torch.no_grad():
        scored = policy(pack_rollouts(rollouts)).logprobs
    written = [logprob for completion in completions for logprob in completion.logprobs]
    return torch.tensor(written, dtype=torch.float64), scored


def test_an_export_is_what_was_trained(model, tmp_path, random_rollouts, in_double):
    rollouts = random_rollouts(0, temperature=0.75)
    policy = policy_of(model)
    trained_steps(policy, pack_rollouts(rollouts))
    policy.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = double(policy)(pack_rollouts(rollouts)).logprobs
        assert distance(ours, own_scores(own_model(tmp_path), rollouts)) < CLOSE
        assert distance(ours, own_scores(own_model(model), rollouts)) > 1e-2


def test_a_resumed_run_goes_on_to_the_bit(model, tmp_path, random_batch):
    policy, before, after = policy_of(model), random_batch(1), random_batch(2)
    optimizer = trained_steps(policy, before)
    state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state")
    trained_steps(policy, after, optimizer=optimizer)

    state = torch.load(tmp_path / "state", weights_only=True)
    resumed = policy_of(model)
    resumed.load_state_dict(state["policy"])
    optimizer = trained_steps(resumed)
    optimizer.load_state_dict(state["optimizer"])
    trained_steps(resumed, after, optimizer=optimizer)
    expected = policy.state_dict()
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_adapters_are_trained_alone_and_merged(model, tmp_path, random_rollouts, in_double):
    rollouts = random_rollouts(0, temperature=0.75)
    policy = Policy(str(model), lora=LoRA(rank=2))
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    trained_steps(policy, *[pack_rollouts(rollouts)] * 2, lr=0.1)
    policy.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = double(policy)(pack_rollouts(rollouts)).logprobs
        assert distance(ours, own_scores(own_model(tmp_path), rollouts)) < SINGLE
        assert distance(ours, own_scores(own_model(model), rollouts)) > 1e-2


@pytest.mark.parametrize("scale", [0.02, 0.001])
@pytest.mark.parametrize("name", TRAINED)
def test_a_micro_batch_that_leaks_is_found_however_small_the_weights(name, scale, tmp_path):
    """0.02 is what transformers initialises most models by."""
    one = ARCHITECTURES[name]
    small = replace(one, sizes=one.sizes | {"initializer_range": scale})
    policy = Policy(str(small.save(tmp_path / "model")))
    assert policy.body_pass.packed == (one.layout == "packed")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scored_exactly_is_refused(name, folder_of):
    with pytest.raises(ConfigError):
        Policy(str(folder_of(name)))
