"""Test VLLMAdapters: two LoRA policies on one base in one vLLM; the rest is in the contract.

That is in test_adapters_contract.py.
"""

import pytest
import torch
from transformers import Qwen3Config

from lightning_rl.engines import VLLMAdapters
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.sync.checkpoint import CheckpointTransport
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.adapter_engines import LORAS, ROLES, Trainers, asked
from tests.support.engine_checks import ROUNDING, gap
from tests.support.shared_engines import SIZES
from tests.support.tiny_models import save_random_model


def started(directory):
    engine = VLLMAdapters(max_lora_rank=10, **SIZES)
    engine.serve(ROLES)
    engine.start(directory)
    return engine


@pytest.fixture(scope="module")
def running(skeleton):
    engine = started(skeleton)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def trainers(tiny_model, running):
    return Trainers(tiny_model, running)


@pytest.fixture
def engine(trainers, running):
    """Return an engine with adapters of versions 3 and 7, whose weights come from seeds 3 and 7."""
    trainers.push("prover", 3)
    trainers.push("verifier", 7)
    return running


def test_what_is_cached_of_old_weights_is_not_met(engine, trainers):
    view = engine.of_policy("prover")
    assert gap(view, trainers.plain("prover")) < ROUNDING  # fills the cache
    old = engine._served[view]
    trainers.push("prover", 4)
    assert gap(view, trainers.plain("prover")) < ROUNDING
    # The old name still finds the old keys and values, so this test can fail.
    engine._served[view] = old
    assert gap(view, trainers.plain("prover")) > 1e-2


def test_the_base_comes_once(skeleton, tiny_model, running, trainers):
    trainers.push("prover", 3)
    for name, transport in trainers.transports.items():
        names = {name for name, _ in transport.weights_of(trainers.policies[name])}
        assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
    both = [*trainers.policies["prover"].named_adapter_weights(),
            *trainers.policies["prover"].named_base_weights()]  # fmt: skip
    with pytest.raises(WeightSyncError, match=r"already holds a base.*call close\(\) first"):
        running.of_policy("prover").load_weights(both, 4)


def test_adapters_travel_through_files_too(tmp_path, tiny_model, running, trainers):
    trainers.push("prover", 3)
    through = Trainers(tiny_model, running, lambda: CheckpointTransport(str(tmp_path)))
    through.push("verifier", 4)
    assert {file.name.partition("-")[0] for file in tmp_path.iterdir()} == {"adapters"}
    (judge,) = asked(running, "judge")
    through.check("verifier", judge)


def test_ranks_that_vllm_has_no_room_for_are_named(engine, trainers):
    layer = "model.layers.1.mlp.up_proj"
    rank = {f"{layer}.lora_A": torch.ones(12, 64), f"{layer}.lora_B": torch.ones(64, 12)}
    pushed = dict(trainers.policies["prover"].named_adapter_weights()) | rank
    with pytest.raises(WeightSyncError, match=r"has rank 12, .* max_lora_rank=10; raise"):
        engine.of_policy("prover").load_weights(pushed.items(), 4)
    large = VLLMAdapters(max_lora_rank=600)
    large.serve(ROLES)
    with pytest.raises(ConfigError, match=r"max_lora_rank=600 must be <= 512"):
        _ = large.settings


@pytest.mark.slow
def test_a_model_whose_ends_vllm_could_adapt_too(tmp_path):
    """vLLM would adapt the embedding and logits of some models, at a price for every token."""
    model = tmp_path / "model"
    sizes = {"vocab_size": 16, "head_dim": 32, "max_position_embeddings": 128}
    save_random_model(model, make_tokenizer(), Qwen3Config, initializer_range=0.2, **sizes)
    save_skeleton(str(model), tmp_path / "skeleton")
    engine = started(tmp_path / "skeleton")
    trainers = Trainers(model, engine)
    for version in range(2):
        for name in LORAS:
            trainers.push(name, version)
        first, judge = asked(engine, "first", "judge")
        trainers.check("prover", first)
        trainers.check("verifier", judge)
    engine.close()
    assert [engine.of_policy(name).version for name in LORAS] == [-1, -1]
    assert engine.of_policy("prover").lacks_base
