"""Engines with two LoRA policies on one base: each exact, each pushed alone, with both of them."""

import asyncio

import pytest
import torch

from lightning_rl.engines import Sampling, TransformersAdapters, VLLMAdapters
from lightning_rl.errors import ConfigError, EngineError, IncompleteWeightsError, WeightSyncError
from lightning_rl.run.loop.background import run_async
from tests.support.adapter_engines import ROLES, Trainers, asked
from tests.support.engine_checks import PROMPTS, require_switch, same_draws
from tests.support.shared_engines import SIZES

MAKE = {
    "transformers": lambda: TransformersAdapters(device="cpu"),
    "vllm": lambda: VLLMAdapters(max_lora_rank=10, **SIZES),
}


@pytest.fixture(scope="module", params=MAKE)
def running(request, skeleton):
    engine = MAKE[request.param]()
    engine.serve(ROLES)
    engine.start(skeleton)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def trainers(tiny_model, running):
    trainers = Trainers(tiny_model, running)
    alone = trainers.policies["prover"].named_adapter_weights()
    with pytest.raises(WeightSyncError, match=r"has no base yet.*lacks_base says when"):
        running.of_policy("prover").load_weights(alone, 1)
    return trainers


@pytest.fixture
def engine(trainers, running):
    """Return an engine with adapters of versions 3 and 7, whose weights come from seeds 3 and 7."""
    trainers.push("prover", 3)
    trainers.push("verifier", 7)
    return running


def test_each_policy_writes_by_its_own_weights_after_any_push(engine, trainers):
    first, second, judge = asked(engine, "first", "second", "judge")
    assert same_draws(first, second)  # one policy, the same seeds
    assert [c.token_ids for c in first] != [c.token_ids for c in judge]
    for version, name in enumerate(("verifier", "prover", "verifier", "verifier"), 8):
        trainers.check("prover", first)
        trainers.check("verifier", judge)
        trainers.push(name, version)
        assert engine.of_policy(name).version == version
        first, judge = asked(engine, "first", "judge")
    assert {v for c in first for v in c.versions} == {9}
    assert {v for c in judge for v in c.versions} == {11}


def test_a_push_to_one_leaves_the_other_as_it_was(engine, trainers):
    (before,) = asked(engine, "judge")
    trainers.push("prover", 4)
    assert engine.of_policy("verifier").version == 7
    (after,) = asked(engine, "judge")
    assert same_draws(before, after)
    trainers.check("verifier", after)


def test_in_flight_tokens_keep_their_version_and_the_other_policy_goes_on(engine, trainers):
    sampling, prompts = Sampling(max_tokens=110, min_tokens=110), PROMPTS[:3]
    (alone,) = asked(engine, "judge", prompts=prompts, sampling=sampling)
    old = trainers.plain("prover")

    async def run():
        tasks = [
            asyncio.create_task(engine.of_role(role).generate(prompt, sampling, seed))
            for role in ("first", "judge")
            for seed, prompt in enumerate(prompts)
        ]
        for _ in range(12):
            await asyncio.sleep(0)
        await asyncio.to_thread(trainers.push, "prover", 5)
        if isinstance(engine, VLLMAdapters):  # of which the prover's alone were begun anew
            scheduler = engine._llm.engine_core.engine_core.scheduler
            requests = [r for r in scheduler.requests.values() if r.num_preemptions]
            assert {r.lora_request.lora_int_id for r in requests} == {1}
        return await asyncio.gather(*tasks)

    completions = run_async(run())
    for prompt, completion in zip(prompts, completions[:3], strict=True):
        plain = {3: old, 5: trainers.plain("prover")}
        for single in require_switch(completion, prompt, plain, sampling):
            assert completion.logprobs != pytest.approx(single, abs=1e-2)
    assert same_draws(completions[3:], alone)
    assert all(completion.versions == [7] * 110 for completion in completions[3:])


def test_adapters_that_do_not_fit_are_named_and_the_others_go_on(engine, trainers):
    good = dict(trainers.policies["prover"].named_adapter_weights())
    (before,) = asked(engine, "judge")
    layer = "model.layers.1.mlp.up_proj"
    halves = [{n: w for n, w in good.items() if n != f"{layer}.lora_{half}"} for half in "AB"]
    tower = {"visual.proj.lora_A": torch.ones(2, 64), "visual.proj.lora_B": torch.ones(64, 2)}
    embedding = {
        "model.embed_tokens.lora_A": torch.ones(2, 64),
        "model.embed_tokens.lora_B": torch.ones(16, 2),
    }
    whole = dict(trainers.policies["prover"].named_base_weights())
    for pushed, error, message in (
        (halves[0], IncompleteWeightsError, rf"lacks '{layer}\.lora_A'"),
        (halves[1], IncompleteWeightsError, rf"lacks '{layer}\.lora_B'"),
        (good | tower, IncompleteWeightsError, r"adapter of 'visual\.proj', but"),
        (good | {f"{layer}.lora_A": torch.ones(2, 64)}, IncompleteWeightsError, r"\(2, 64\)"),
        (good | embedding, WeightSyncError, r"cannot adapt .*'model\.embed_tokens'"),
        (whole, WeightSyncError, "contains no adapters"),
    ):
        with pytest.raises(error, match=message):
            engine.of_policy("prover").load_weights(pushed.items(), 4)
        with pytest.raises(EngineError, match="no trained weights"):
            asked(engine, "first")
    (after,) = asked(engine, "judge")
    assert same_draws(before, after)
    with pytest.raises(WeightSyncError, match=r"takes the weights of one policy at a time"):
        engine.load_weights(good.items(), 4)
    with pytest.raises(ConfigError, match=r"plays role 'third'; .* first, judge, second: add it"):
        engine.of_role("third")
