"""An export keeps what the model's files said, and what transformers refuses to write is mended."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_rl.models.generation_config import repaired
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import model_of


def warned(call, *args):
    """Return a call's result, and the lines of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*args)
    return result, [str(one.message) for one in caught if "refuses to write" in str(one.message)]


def test_a_sound_generation_config_stays_as_it_is():
    for given in (GenerationConfig(), GenerationConfig(do_sample=True, temperature=0.6, top_k=20)):
        assert warned(repaired, given, "m") == (given, [])


@pytest.mark.parametrize(
    ("given", "kept", "told"),
    [
        ({"temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, "do_sample: true"),
        ({"top_p": 0.9}, {"do_sample": True, "top_p": 0.9}, "do_sample: true"),
        ({"top_k": 20}, {"do_sample": True, "top_k": 20}, "do_sample: true"),
        # Both of these mean the likeliest token.
        (
            {"temperature": 0.0, "top_p": 0.9},
            {"temperature": None, "top_p": None},
            "no temperature",
        ),
        ({"do_sample": False, "top_k": 20}, {"do_sample": False, "top_k": None}, "no top_k"),
        # What else it refuses is left out, and so is what goes with it.
        ({"top_k": 20, "early_stopping": True}, {"early_stopping": None}, "special tokens alone"),
    ],
)
def test_what_cannot_be_written_is_mended_with_one_line(tmp_path, given, kept, told):
    config = GenerationConfig(eos_token_id=[1, 5], **given)
    with pytest.raises(ValueError, match="Fix these issues"):
        config.save_pretrained(tmp_path)
    made, lines = warned(repaired, config, "my/model")
    made.save_pretrained(tmp_path)
    assert made.eos_token_id == [1, 5]
    assert {name: getattr(made, name) for name in kept} == kept
    [line] = lines
    assert line.startswith("model='my/model': transformers refuses to write")
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_a_finished_run_is_exported_whatever_the_model_brought(tiny_model, tmp_path, lora):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    said = {"eos_token_id": [5], "temperature": 0.6, "top_p": 0.9}
    (model / "generation_config.json").write_text(json.dumps(said))
    policy = Policy(str(model), lora=lora)
    _, lines = warned(policy.save_pretrained, tmp_path / "first")
    assert len(lines) == 1
    assert warned(policy.save_pretrained, tmp_path / "second")[1] == []
    for folder in ("first", "second"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert (written["do_sample"], written["temperature"], written["top_p"]) == (True, 0.6, 0.9)
        assert written["eos_token_id"] == [1, 5]  # the tokenizer's, too
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).can_generate()


def test_a_model_object_is_taken_whatever_it_brought(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    lm.generation_config.temperature = 0.6
    given, lines = warned(model_of, (lm, AutoTokenizer.from_pretrained(tiny_model)))
    assert len(lines) == 1
    assert GenerationConfig.from_pretrained(given).do_sample
    assert lm.generation_config.do_sample is None
    copied = dict(Policy(given).named_weights())
    for name, weight in lm.state_dict().items():
        assert torch.equal(copied[name], weight)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_an_export_has_the_dtypes_of_the_models_files(tiny_model, tmp_path, lora):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    kept = {n: w if n == "model.norm.weight" else w.bfloat16() for n, w in weights.items()}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    for dtype in ("bfloat16", None):  # None: the weights alone say it
        (model / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        policy = Policy(str(model), lora=lora)
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if parameter.requires_grad and ".lora_" not in name:
                    parameter.mul_(1.0 + 2**-12)  # lost in bfloat16, kept in float32
        policy.save_pretrained(tmp_path / "export")
        written = load_file(tmp_path / "export/model.safetensors")
        assert {n: w.dtype for n, w in written.items()} == {n: w.dtype for n, w in kept.items()}
        held = dict(policy.named_weights())
        for name, weight in written.items():
            assert torch.equal(weight, held[name].to(weight.dtype))
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
        assert back.dtype == torch.bfloat16
        shutil.rmtree(tmp_path / "export")


def test_an_export_has_no_more_bits_than_the_policy(tiny_model, tmp_path):
    Policy(str(tiny_model)).to(torch.bfloat16).save_pretrained(tmp_path)
    dtypes = {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
