"""A model that is packed as it is read: the same as one that was whole before, in less memory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.allocations import peak_while
from lightning_rl import NF4, Int8
from lightning_rl.errors import ConfigError
from lightning_rl.models.pretrained import Loading, load_lm
from lightning_rl.models.quantized_layers import quantize, quantized_layers
from tests.support.tiers import follows_memory
from tests.support.tiny_models import chatml_tokenizer, save_random_model

FORMS = [NF4(), Int8()]


@pytest.fixture(params=FORMS, ids=lambda form: type(form).__name__)
def form(request):
    return request.param


@pytest.fixture
def changed(tiny_model, tmp_path):
    """Return a copy of the tiny model whose weights a function changes."""

    def change(function):
        shutil.copytree(tiny_model, tmp_path / "changed")
        file = tmp_path / "changed" / "model.safetensors"
        weights = load_file(file)
        function(weights)
        save_file(weights, file, metadata={"format": "pt"})
        return str(tmp_path / "changed")

    return change


def test_it_is_the_model_that_was_whole_before(tiny_model, tmp_path, form):
    whole = load_lm(str(tiny_model), Loading())
    quantize(whole, form)
    read = load_lm(str(tiny_model), Loading(), form)
    expected, state = whole.state_dict(), read.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert len(quantized_layers(read)) == 14
    assert not any(
        p.requires_grad for m in quantized_layers(read).values() for p in m.parts.values()
    )
    # To whoever writes its configuration, it is a model like any other.
    read.config.save_pretrained(tmp_path)
    assert "quantization" not in (tmp_path / "config.json").read_text()
    assert not getattr(read, "is_quantized", False)
    with torch.device("meta"):
        shapes = load_lm(str(tiny_model), Loading(), form).state_dict()
    assert {n: (t.shape, t.dtype) for n, t in shapes.items()} == {
        n: (t.shape, t.dtype) for n, t in state.items()
    }


@follows_memory
def test_it_is_never_whole_in_memory(tmp_path, form, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    save_random_model(
        tmp_path, chatml_tokenizer(), vocab_size=512, hidden_size=256, intermediate_size=1024,
        num_hidden_layers=6,
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    lm.save_pretrained(tmp_path)
    load_lm(str(tmp_path), Loading(), form)  # imports what it needs
    whole = sum(p.numel() for p in lm.parameters()) * 4
    largest = max(p.numel() for p in lm.parameters()) * 4
    assert whole > 15 * largest
    packed = load_lm(str(tmp_path), Loading(), form)
    # These are packed, and have weights of one layer in several forms on the way there.
    most = sum(p.nbytes for p in packed.parameters()) + 4 * largest
    del packed
    mapped = (tmp_path / "model.safetensors").stat().st_size  # is counted, but takes no memory
    assert peak_while(lambda: load_lm(str(tmp_path), Loading(), form)) - mapped < most
    assert peak_while(lambda: load_lm(str(tmp_path), Loading())) - mapped >= whole > 2 * most


def test_what_is_wrong_with_files_is_said_as_of_a_whole_model(changed, form):
    name = "model.layers.0.mlp.up_proj.weight"

    def damage(weights):
        weights["model.layers.1.self_attn.q_proj.weight"][3, 5] = torch.nan

    model = changed(damage)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj\.weight") as whole:
        load_lm(model, Loading())
    with pytest.raises(ConfigError) as packed:
        load_lm(model, Loading(), form)
    assert str(packed.value) == str(whole.value)
    assert name not in str(whole.value)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("change", ["missing", "shape"])
def test_missing_and_misshapen_weights_are_refused(changed, form, name, change):
    def damage(weights):
        if change == "missing":
            del weights[name]
        else:
            weights[name] = weights[name][:-8].clone()

    model = changed(damage)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as whole:
        load_lm(model, Loading())
    with pytest.raises(ConfigError) as packed:
        load_lm(model, Loading(), form)
    assert str(packed.value) == str(whole.value)


def test_files_that_are_quantised_already_are_refused(tiny_model, tmp_path, form):
    shutil.copytree(tiny_model, tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    theirs = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": theirs}))
    assert AutoConfig.from_pretrained(tmp_path / "theirs").quantization_config
    with pytest.raises(ConfigError, match="quantised already"):
        load_lm(str(tmp_path / "theirs"), Loading(), form)
