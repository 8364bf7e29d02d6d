"""TransformersAdapters; what each engine with adapters does is in test_adapters_contract.py."""

import pytest
import torch

from lightning_rl import WeightSync
from lightning_rl.engines import TransformersAdapters, TransformersEngine, VLLMAdapters
from lightning_rl.errors import ConfigError
from lightning_rl.extend import MultiPolicyEngine
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.sync.base import push
from lightning_rl.sync.memory import MemoryTransport
from tests.support.adapter_engines import FIXED, ROLES, Trainers, asked
from tests.support.engine_checks import (
    PROMPTS,
    generate,
    plain_model,
    require_written_by,
    train_adapters,
)
from tests.support.lots import LotAdapters, LotEngine
from tests.support.small_run import trainer_of
from tests.support.two_roles import roles_data, roles_module


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


def test_a_layer_that_is_adapted_no_more(engine, tiny_model):
    """Another run may train fewer layers: what the last one brought there is gone."""
    trainers = Trainers(tiny_model, engine)
    trainers.push("prover", 3)
    fewer = Policy(str(tiny_model), lora=LoRA(rank=2, target_modules=["o_proj"]))
    plain = plain_model(tiny_model, train_adapters(fewer, seed=5))
    engine.of_policy("prover").load_weights(fewer.named_adapter_weights(), 5)
    require_written_by(plain, PROMPTS, asked(engine, "first")[0], FIXED)


def test_with_one_policy_it_takes_whole_weights(skeleton, policies):
    weights = dict(policies["prover"].named_weights())
    made = []
    for engine in (TransformersAdapters(device="cpu"), TransformersEngine(device="cpu")):
        if isinstance(engine, TransformersAdapters):
            engine.serve({"first": "solver", "second": "solver"})
            assert engine.of_policy("solver") is engine.of_role("second") is engine
        engine.start(skeleton)
        engine.load_weights(weights.items(), 2)
        made.append(generate(engine, PROMPTS, FIXED))
        engine.close()
    assert made[0] == made[1]


def test_policies_that_are_not_there_are_named(engine):
    with pytest.raises(ConfigError, match="has no policy 'third'; it serves prover, verifier"):
        engine.of_policy("third")
    with pytest.raises(ConfigError, match=r"serves prover, verifier; call close\(\) first"):
        engine.serve({"first": "a", "second": "b"})


def test_a_policy_without_lora_is_refused(tiny_model, engine):
    transport = MemoryTransport()
    transport.connect(engine.of_policy("prover"))
    with pytest.raises(ConfigError, match=r"needs a LoRA policy; .* use MultiPolicyEngine"):
        push(transport, engine.of_policy("prover"), Policy(str(tiny_model)), 0)


def test_a_policy_with_a_model_of_its_own_is_refused(tmp_path):
    (tmp_path / "verifier").mkdir()
    engine = TransformersAdapters(device="cpu")
    engine.serve(ROLES)
    with pytest.raises(ConfigError, match=r"policy 'verifier' starts from its own model; leave"):
        engine.start(tmp_path)


def test_several_policies_cannot_be_merged_into_one_base():
    engine = TransformersAdapters(device="cpu", adapters="merged")
    with pytest.raises(
        ConfigError, match=r"serves prover, verifier on one base.*MultiPolicyEngine"
    ):
        engine.serve(ROLES)
    engine.serve({"first": "solver"})


def test_views_follow_the_engine(skeleton):
    engine = TransformersAdapters(device="cpu")
    engine.serve(ROLES)
    engine.configure_dtype("bfloat16")
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
    each = MultiPolicyEngine({name: LotEngine(device="cpu") for name in ("first", "second")})
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
    with pytest.raises(ConfigError, match="sleep_level=2 would discard the base"):
        VLLMAdapters(sleep_level=2)
    with pytest.raises(ConfigError, match="max_lora_rank=0 must be >= 1"):
        VLLMAdapters(max_lora_rank=0)
    assert "enable_lora" not in VLLMAdapters().settings.options  # one policy: merged
