"""Test one LoRA policy: when an engine keeps its adapters apart, and what it then writes."""

import logging
import math

import pytest
import torch

from lightning_rl.engines import Sampling, TransformersEngine, VLLMLocal, VLLMServer
from lightning_rl.engines.vllm import settings as vllm_settings
from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.learn.compatibility import configure_engine
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.module import PolicyModule
from lightning_rl.sync.base import push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    PROMPTS,
    generate,
    plain_model,
    require_written_by,
    train_adapters,
)

SAMPLING = Sampling(max_tokens=12, min_tokens=12)


def told(engine, rank, obstacle=None):
    engine.configure_lora(rank, lambda: obstacle)
    return engine


def started(model, rank, dtype="float32"):
    engine = told(TransformersEngine(dtype, device="cpu", adapters="apart"), rank)
    engine.start(model)
    return engine


# -------------------------------------------------------------------- which way


@pytest.mark.parametrize(
    ("adapters", "dtype", "apart"),
    [
        (None, "bfloat16", True),
        (None, "float16", True),
        (None, "float32", False),
        ("apart", "float32", True),
        ("merged", "bfloat16", False),
    ],
)
def test_apart_is_the_default_in_16_bits(adapters, dtype, apart):
    for engine in (
        TransformersEngine(dtype, adapters=adapters),
        VLLMLocal(dtype, adapters=adapters),
        VLLMServer(dtype=dtype, adapters=adapters),
    ):
        assert told(engine, 8).takes_adapters == engine.lacks_base == apart
        assert not told(engine, None).takes_adapters  # all weights are trained
    rounded = VLLMLocal(dtype, quantization="fp8_per_channel", adapters=adapters)
    assert told(rounded, 8).takes_adapters == (adapters != "merged")
    assert told(VLLMLocal(dtype, adapters=adapters), 9).settings.options == (
        {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 16}
        if apart
        else {}
    )


@pytest.mark.parametrize(
    ("engine", "obstacle", "why"),
    [
        (lambda **a: VLLMLocal(quantization="fp8", **a), None, "quantization='fp8'"),
        (lambda **a: VLLMLocal(sleep_level=2, **a), None, "sleep_level=2"),
        (lambda **a: VLLMServer(tensor_parallel_size=2, **a), None, "tensor_parallel_size=2"),
        (
            lambda **a: VLLMServer(options={"weight_transfer_config": {"backend": "nccl"}}, **a),
            None,
            "backend nccl, brings whole weights",
        ),
        (lambda **a: TransformersEngine(**a), "DoRA is no sum", "DoRA is no sum"),
    ],
)
def test_what_is_not_proven_is_merged_and_said(caplog, engine, obstacle, why):
    with caplog.at_level(logging.WARNING):
        merged = told(engine(dtype="bfloat16"), 8, obstacle)
    assert not merged.takes_adapters
    assert why in caplog.text
    assert "lack small updates" in caplog.text
    with pytest.raises(ConfigError, match=rf"adapters='apart': .*{why}.*; set adapters: merged"):
        told(engine(dtype="bfloat16", adapters="apart"), 8, obstacle)
    caplog.clear()
    assert not told(engine(dtype="bfloat16", adapters="merged"), 8, obstacle).takes_adapters
    assert not caplog.text


@pytest.mark.parametrize(("version", "apart"), [("0.26.0", False), ("0.28.0+cpu", True)])
def test_a_vllm_that_cannot_keep_adapters_apart_is_named_before_it_starts(
    version, apart, monkeypatch, caplog
):
    monkeypatch.setattr(vllm_settings, "read_vllm_version", lambda: version)
    for engine in (VLLMLocal, VLLMServer):
        caplog.clear()
        assert told(engine(dtype="bfloat16"), 8).takes_adapters == apart
        assert ("vLLM 0.26.0 cannot take new base weights" in caplog.text) != apart
    if not apart:
        with pytest.raises(ConfigError, match=r"install vLLM >=0\.28; set adapters: merged"):
            told(VLLMLocal(adapters="apart"), 8)
    # Servers that run already may be of another version.
    there = VLLMServer(["http://10.0.0.7:8000"], dtype="bfloat16", adapters="apart")
    assert told(there, 8).takes_adapters


def test_servers_that_run_already_are_asked_only_if_told(caplog):
    there = {"urls": ["http://10.0.0.7:8000"], "dtype": "bfloat16"}
    assert not told(VLLMServer(**there), 8).takes_adapters
    assert "may lack --enable-lora" in caplog.text
    assert told(VLLMServer(**there, adapters="apart"), 8).takes_adapters


def test_another_word_is_refused():
    for engine in (TransformersEngine, VLLMLocal):
        with pytest.raises(
            ConfigError, match="adapters='beside' must be 'apart', 'merged' or null"
        ):
            engine(adapters="beside")


def test_a_data_module_tells_its_engine_of_the_lora(tiny_model):
    engine = TransformersEngine(device="cpu")
    for lora, apart in ((LoRA(rank=4), True), (LoRA(options={"use_dora": True}), False)):
        configure_engine(engine, PolicyModule(str(tiny_model), lora=lora), "bfloat16")
        assert engine.takes_adapters == apart
    configure_engine(engine, PolicyModule(str(tiny_model), lora=LoRA()), "float32")
    assert not engine.takes_adapters


# -------------------------------------------------------------------- what it writes


@pytest.mark.parametrize("kind", [MemoryTransport, CheckpointTransport])
def test_it_writes_what_the_trainer_computes(tiny_model, tmp_path, kind):
    """rsLoRA scales by 6 / sqrt(9). The base comes once, and again after the engine lost it."""
    lora = LoRA(rank=9, alpha=6.0, options={"use_rslora": True})
    policy, engine = Policy(str(tiny_model), lora=lora), started(tiny_model, 9)
    transport = kind(**({"directory": str(tmp_path)} if kind is CheckpointTransport else {}))
    transport.connect(engine)
    for version in range(4):
        plain = plain_model(tiny_model, train_adapters(policy, seed=version))
        names = {name for name, _ in transport.weights_of(policy)}
        assert all(".lora_" in name for name in names) == (version in (1, 3))
        push(transport, engine, policy, version)
        assert engine.version == version
        require_written_by(plain, PROMPTS, generate(engine, PROMPTS, SAMPLING), SAMPLING)
        held = engine._lm.state_dict()
        for name, weight in policy.named_base_weights():
            assert torch.equal(held[name], weight), name
        if version == 1:
            engine.close()
            engine.start(tiny_model)
    scale = policy.lm.get_submodule("model.layers.0.mlp.up_proj").scaling["default"]
    assert scale == pytest.approx(6 / math.sqrt(9))


def test_an_update_that_a_merge_loses_whole(tiny_model):
    """Weights 1, an update of +-2^-9: half a unit in the last place of bfloat16 and less.

    Merged, 1 + 2^-9 and 1 - 2^-9 are both rounded to 1. Of an input 1, -1, 1, ... of 64 numbers
    the base makes 0, and A = (1, -1, 1, ...), B = 2^-9 make 64 / 512 of it.
    """
    policy = Policy(str(tiny_model), lora=LoRA(rank=1, alpha=1.0, target_modules=["up_proj"]))
    name = "model.layers.0.mlp.up_proj"
    signs = torch.tensor([1.0, -1.0] * 32)
    with torch.no_grad():
        layer = policy.lm.get_submodule(name)
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.copy_(signs)
        layer.lora_B["default"].weight.fill_(2.0**-9)
    made = {}
    for way in ("apart", "merged"):
        engine = told(TransformersEngine("bfloat16", device="cpu", adapters=way), 1)
        engine.start(tiny_model)
        transport = MemoryTransport()
        transport.connect(engine)
        push(transport, engine, policy, 1)
        if way == "apart":
            engine._adapters.begin([engine])
        with torch.inference_mode():
            output = engine._lm.get_submodule(name)(signs.bfloat16()[None, None])
        made[way] = output.unique().tolist()
        engine.close()
    with torch.autocast("cpu", torch.bfloat16):
        trainer = layer(signs[None, None]).unique().tolist()
    assert made == {"apart": [0.125], "merged": [0.0]}
    assert trainer == [0.125]


def test_adapters_without_their_base_are_named(tiny_model):
    policy, engine = Policy(str(tiny_model), lora=LoRA(rank=4)), started(tiny_model, 4)
    with pytest.raises(WeightSyncError, match="has no base yet"):
        engine.load_weights(policy.named_adapter_weights(), 0)
