"""TransformersAdapters: policies side by side in one batch, each by its own weights alone."""

import asyncio

import pytest
import torch

from lightning_rl import WeightSync
from lightning_rl.engines import Sampling, TransformersAdapters, TransformersEngine, VLLMAdapters
from lightning_rl.errors import ConfigError, EngineError, IncompleteWeightsError, WeightSyncError
from lightning_rl.extend import PolicyEngines
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop import run_async
from lightning_rl.sync.base import push
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    PROMPTS,
    ROUNDING,
    generate,
    plain_model,
    require_switch,
    train_adapters,
    true_logprobs,
)
from tests.support.lots import LotAdapters, LotEngine
from tests.support.small_run import trainer_of
from tests.support.two_roles import roles_data, roles_module

ROLES = {"first": "prover", "second": "prover", "judge": "verifier"}
SAMPLING = Sampling(max_tokens=12, min_tokens=12)


@pytest.fixture(scope="module")
def policies(tiny_model):
    loras = {"prover": LoRA(rank=6), "verifier": LoRA(rank=3, target_modules=["v_proj", "up_proj"])}
    return {name: Policy(str(tiny_model), lora=lora) for name, lora in loras.items()}


@pytest.fixture
def engine(skeleton):
    engine = TransformersAdapters(device="cpu")
    engine.serve(ROLES)
    engine.start(skeleton)
    yield engine
    engine.close()


@pytest.fixture
def pushed(tiny_model, policies, engine):
    """Push other weights than before; returns how transformers computes them, merged."""
    transports = {name: MemoryTransport() for name in policies}
    for name, transport in transports.items():
        transport.connect(engine.of_policy(name))

    def push_one(name, version):
        weights = train_adapters(policies[name], seed=version)
        push(transports[name], engine.of_policy(name), policies[name], version)
        return plain_model(tiny_model, weights)

    return push_one


def side_by_side(engine, sampling=SAMPLING):
    """What both policies write to the same prompts, in one batch."""

    async def run():
        ways = [engine.of_role(role) for role in ("first", "judge")]
        seeded = list(enumerate(PROMPTS))
        answers = [way.generate(prompt, sampling, seed) for seed, prompt in seeded for way in ways]
        return await asyncio.gather(*answers)

    both = run_async(run())
    return both[::2], both[1::2]


def check(plain, completions, version):
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, SAMPLING)
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
        assert set(completion.versions) == {version}


def test_each_policy_writes_by_its_own_weights_after_any_push(engine, pushed):
    prover, verifier = pushed("prover", 3), pushed("verifier", 7)
    for version, name in enumerate(("verifier", "prover", "prover"), 8):
        first, judge = side_by_side(engine)
        check(prover, first, engine.of_policy("prover").version)
        check(verifier, judge, engine.of_policy("verifier").version)
        assert [c.token_ids for c in first] != [c.token_ids for c in judge]
        if name == "prover":
            prover = pushed(name, version)
        else:
            verifier = pushed(name, version)
    assert [engine.of_policy(name).version for name in ("prover", "verifier")] == [10, 8]


def test_a_push_to_one_leaves_the_other_as_it_was(engine, pushed):
    pushed("prover", 3), pushed("verifier", 7)
    judge = engine.of_role("judge")
    before = generate(judge, PROMPTS, SAMPLING)
    pushed("prover", 4)
    assert generate(judge, PROMPTS, SAMPLING) == before  # to the last bit


def test_tokens_in_flight_keep_the_version_that_wrote_them(engine, pushed):
    old, verifier = pushed("prover", 3), pushed("verifier", 7)

    async def run():
        writing = asyncio.gather(
            *(
                engine.of_role(role).generate(prompt, SAMPLING, seed)
                for role in ("first", "judge")
                for seed, prompt in enumerate(PROMPTS)
            )
        )
        while not any(request.tokens for request in engine._writing):
            await asyncio.sleep(0)
        new = await asyncio.to_thread(pushed, "prover", 4)
        return await writing, new

    completions, new = run_async(run())
    first, judge = completions[: len(PROMPTS)], completions[len(PROMPTS) :]
    check(verifier, judge, 7)
    for prompt, completion in zip(PROMPTS, first, strict=True):
        require_switch(completion, prompt, {3: old, 4: new}, SAMPLING)


def test_a_layer_that_is_adapted_no_more(engine, pushed, policies, tiny_model):
    """As where another run trains fewer layers: what the last one brought there is gone."""
    pushed("prover", 3), pushed("verifier", 7)
    fewer = Policy(str(tiny_model), lora=LoRA(rank=2, target_modules=["o_proj"]))
    plain = plain_model(tiny_model, train_adapters(fewer, seed=5))
    engine.of_policy("prover").load_weights(fewer.named_adapter_weights(), 5)
    check(plain, side_by_side(engine)[0], 5)


def test_adapters_that_do_not_fit_are_named_and_the_other_policy_goes_on(engine, pushed, policies):
    with pytest.raises(WeightSyncError, match=r"has no base yet.*lacks_base says when"):
        engine.of_policy("prover").load_weights(policies["prover"].named_adapter_weights(), 1)
    pushed("prover", 3), pushed("verifier", 7)
    good = dict(policies["prover"].named_adapter_weights())
    name = "model.layers.1.mlp.up_proj.lora_A"
    embedding = {
        "model.embed_tokens.lora_A": torch.ones(2, 64),
        "model.embed_tokens.lora_B": torch.ones(16, 2),
    }
    before = generate(engine.of_role("judge"), PROMPTS, SAMPLING)
    for push_of, error, message in (
        ({n: w for n, w in good.items() if n != name}, IncompleteWeightsError, f"left out '{name}"),
        (good | {"tower.lora_A": torch.ones(2, 2)}, IncompleteWeightsError, "adapter of 'tower', "),
        (good | embedding, WeightSyncError, r"cannot adapt 'model\.embed_tokens', a .*Embedding"),
        (dict(policies["prover"].named_base_weights()), WeightSyncError, "brings no adapters"),
    ):
        with pytest.raises(error, match=message):
            engine.of_policy("prover").load_weights(push_of.items(), 4)
        with pytest.raises(EngineError, match="no trained weights"):
            generate(engine.of_role("first"), [[3]], SAMPLING)
    assert generate(engine.of_role("judge"), PROMPTS, SAMPLING) == before


def test_with_one_policy_it_takes_whole_weights(skeleton, policies):
    weights = dict(policies["prover"].named_weights())
    made = []
    for engine in (TransformersAdapters(device="cpu"), TransformersEngine(device="cpu")):
        if isinstance(engine, TransformersAdapters):
            engine.serve({"first": "solver", "second": "solver"})
            assert engine.of_policy("solver") is engine.of_role("second") is engine
        engine.start(skeleton)
        engine.load_weights(weights.items(), 2)
        made.append(generate(engine, PROMPTS, SAMPLING))
        engine.close()
    assert made[0] == made[1]


def test_policies_and_roles_that_are_not_there_are_named(engine):
    with pytest.raises(ConfigError, match=r"plays role 'third'; .* first, judge, second: name it"):
        engine.of_role("third")
    with pytest.raises(ConfigError, match="serves no policy 'third', only prover, verifier"):
        engine.of_policy("third")
    with pytest.raises(ConfigError, match=r"serves prover, verifier; close\(\) it first"):
        engine.serve({"first": "a", "second": "b"})
    with pytest.raises(WeightSyncError, match="weights of one policy: of_policy"):
        engine.load_weights([], 0)


def test_a_policy_without_lora_is_refused(tiny_model, engine):
    transport = MemoryTransport()
    transport.connect(engine.of_policy("prover"))
    with pytest.raises(ConfigError, match=r"need a LoRA policy; .* use PolicyEngines"):
        push(transport, engine.of_policy("prover"), Policy(str(tiny_model)), 0)


def test_a_policy_with_a_model_of_its_own_is_refused(tmp_path):
    (tmp_path / "verifier").mkdir()
    engine = TransformersAdapters(device="cpu")
    engine.serve(ROLES)
    with pytest.raises(ConfigError, match=r"policy 'verifier' starts from a model of its own; lea"):
        engine.start(tmp_path)


def test_several_policies_cannot_be_merged_into_one_base():
    engine = TransformersAdapters(device="cpu", adapters="merged")
    with pytest.raises(ConfigError, match=r"serves prover, verifier on one base.*PolicyEngines"):
        engine.serve(ROLES)
    engine.serve({"first": "solver"})


def test_views_follow_the_engine(skeleton):
    engine = TransformersAdapters(device="cpu")
    engine.serve(ROLES)
    engine.follow_dtype("bfloat16")
    view = engine.of_policy("prover")
    assert (view.dtype, view.precision, view.running) == ("bfloat16", "bfloat16", False)
    engine.start(skeleton)
    assert (view.running, view.max_length, view.lacks_base) == (True, 128, True)
    engine.caught_up(4)
    assert (engine.version, view.version) == (4, -1)
    engine.close()
    assert (engine.version, view.running) == (-1, False)


def test_a_run_is_the_same_as_with_an_engine_for_each(tiny_model, tmp_path):
    found = []
    each = PolicyEngines({name: LotEngine(device="cpu") for name in ("first", "second")})
    for engine in (each, LotAdapters(device="cpu")):
        torch.manual_seed(0)  # of the adapters' first weights
        trainer = trainer_of(tmp_path, [WeightSync()])
        trainer.fit(roles_module(tiny_model), roles_data(iterations_per_epoch=2, engine=engine))
        metrics = trainer.callback_metrics
        names = ("reward/mean", "policy/first/loss", "policy/second/entropy")
        found.append([float(metrics[name]) for name in names])
        assert metrics["sync/second/version"] == 2
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_what_vllm_could_not_serve_is_refused():
    with pytest.raises(ConfigError, match="sleep_level=2 would lose the base"):
        VLLMAdapters(sleep_level=2)
    with pytest.raises(ConfigError, match="max_lora_rank=0 must be >= 1"):
        VLLMAdapters(max_lora_rank=0)
    assert "enable_lora" not in VLLMAdapters().settings.options  # one policy: merged
