"""Every broken model is refused in one message that names its file, before an engine starts."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.engines import TransformersEngine
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import require_sound_model
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from tests.support.small_run import data_module, grpo, trainer_of


def cut_short(place: Path) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbage(place: Path) -> None:
    (place / "model.safetensors").write_bytes(b"no such thing" * 100)


def configured(**changes) -> object:
    def change(place: Path) -> None:
        file = place / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def weighted(change) -> object:
    def rewrite(place: Path) -> None:
        weights = change(load_file(place / "model.safetensors"))
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def one_nan(weights):
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    return weights


def removed(*patterns: str) -> object:
    def remove(place: Path) -> None:
        for pattern in patterns:
            for file in place.glob(pattern):
                file.unlink()

    return remove


def more_tokens(place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens([f"<{n}>" for n in range(20)])
    tokenizer.save_pretrained(place)


def no_json(place: Path) -> None:
    (place / "config.json").write_text("{")


BROKEN = {
    "cut short": (cut_short, r"model\.safetensors \(\d+ bytes\) is truncated or damaged"),
    "garbage": (garbage, r"model\.safetensors \(\d+ bytes\) is truncated or damaged"),
    "no model type": (configured(model_type=None), r"config\.json has no model_type"),
    "no JSON": (no_json, r"config\.json is not valid JSON"),
    "no configuration": (removed("config.json"), "has no config.json"),
    "no weights": (removed("*.safetensors"), r"model='.*broken'.*model\.safetensors"),
    "wrong shapes": (
        configured(hidden_size=128),
        r"model\.safetensors: model\.embed_tokens\.weight has the shape \(16, 64\), but "
        r"config\.json asks for \(16, 128\)",
    ),
    "fewer layers": (
        weighted(lambda weights: {k: v for k, v in weights.items() if "layers.1." not in k}),
        r"model\.safetensors lacks model\.layers\.1\.input_layernorm\.weight, .* and 9 more",
    ),
    "NaN": (
        weighted(one_nan),
        r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight holds 1 of 4096 numbers",
    ),
    "no tokenizer": (removed("token*"), "has no tokenizer"),
    "a tokenizer of another model": (
        more_tokens,
        r"tokenizer\.json knows tokens up to \d+, but the embedding has 16 rows",
    ),
}


@pytest.fixture
def broken(tiny_model, tmp_path, request) -> Path:
    place = tmp_path / "broken"
    shutil.copytree(tiny_model, place)
    BROKEN[request.param][0](place)
    return place


@pytest.mark.parametrize(
    ("broken", "message"), [(n, m) for n, (_, m) in BROKEN.items()], indirect=["broken"]
)
def test_the_file_is_named(broken, message):
    with pytest.raises(ConfigError, match=message) as said:
        require_sound_model(str(broken))
    assert len(str(said.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [(name, BROKEN[name][1]) for name in ("wrong shapes", "fewer layers", "no weights")],
    indirect=["broken"],
)
def test_files_are_compared_by_their_headers(broken, message, monkeypatch):
    """The comparison needs no ``accelerate``, without which transformers cannot skip loading."""
    refuse = Mock(side_effect=AssertionError("weights were loaded"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=message):
        require_sound_model(str(broken))


def test_files_of_a_base_model_are_left_to_loading(tiny_model, tmp_path):
    """Their names lack a prefix, so by them alone all would be missing."""
    place = tmp_path / "base"
    shutil.copytree(tiny_model, place)
    weighted(lambda weights: {k.removeprefix("model."): v for k, v in weights.items()})(place)
    require_sound_model(str(place))
    Policy(str(place))


@pytest.mark.parametrize("broken", ["wrong shapes", "fewer layers", "NaN"], indirect=True)
def test_a_policy_is_never_made_of_it(broken):
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Policy(str(broken))


@pytest.mark.parametrize("broken", ["NaN"], indirect=True)
def test_no_engine_starts_for_it(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "start", lambda *_: pytest.fail("it was started"))
    trainer = trainer_of(tmp_path, [], logger=False)
    with pytest.raises(ConfigError, match="NaN or infinite"):
        trainer.fit(grpo(broken), data_module())


def test_a_good_model_passes_and_draws_no_random_numbers(tiny_model):
    before = torch.get_rng_state()
    require_sound_model(str(tiny_model))
    require_sound_model(str(tiny_model), Loading(random_init=True))
    assert torch.equal(torch.get_rng_state(), before)  # a critic is drawn from them afterwards
