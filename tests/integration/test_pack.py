"""Test packs of real runs: made again elsewhere, differences found, strangers' refused."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lightning_rl.cli import main
from lightning_rl.cli.pack.archive import extract_archive
from lightning_rl.cli.rerun.run import RecordedRun
from tests.support.packs import changed
from tests.support.recorded_run import make_place, stand_in, train

pytestmark = pytest.mark.usefixtures("there")


@pytest.fixture(scope="module")
def step(place, finished) -> Path:
    """Return a pack of iteration 3."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(place, patch)
        assert main(["pack", str(finished), "--iteration", "3", "--out", "step.zip"]) == 0
    return place / "step.zip"


def test_a_step_is_made_again_elsewhere_bit_by_bit(step, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # with neither prompts, rewards nor the model
    assert main(["unpack", str(step), "--run", "--out", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "wrote the run directory run, for iteration 3"
    assert said[-1] == "equal to the bit"
    kept = RecordedRun(tmp_path / "run").kept
    assert [one.version for one in kept] == [0, 2]
    assert main(["unpack", str(step), "--run", "--out", "run"]) == 2
    assert "--out run exists" in capsys.readouterr().err


def test_a_pack_names_nothing_of_this_machine(step, place, tiny_model, tmp_path):
    about = extract_archive(step, tmp_path / "parts")
    assert about["processes"] == 1
    assert "the data module, since recorded rollouts are trained on" in about["left_out"]
    for file in (tmp_path / "parts").rglob("*.*"):
        content = file.read_bytes()
        for folder in (place, tiny_model, Path.home()):
            assert f"{folder}/".encode() not in content, file
        assert b"rerun_rewards" not in content, file  # the user's code
    config = yaml.safe_load((tmp_path / "parts/config.yaml").read_text())
    assert config["model"]["init_args"]["model"] == "models/0"
    assert config["model"]["init_args"]["loading"]["random_init"] is True
    assert not list((tmp_path / "parts/models/0").glob("*.safetensors"))


def test_the_first_stage_that_differs_is_named(step, tmp_path, capsys):
    def scale(parts: Path) -> None:
        file = parts / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["model"]["init_args"]["advantage"]["init_args"]["normalize_std"] = False
        file.write_text(yaml.safe_dump(config))

    changed_step = changed(step, tmp_path, scale)
    assert main(["unpack", str(changed_step), "--run", "--out", str(tmp_path / "run")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"different: column advantages, rollout 3/\S+, token 0", last)


def test_weights_that_changed_are_named(step, tmp_path, capsys):
    def shift(parts: Path) -> None:
        tensors = load_file(parts / "checkpoint.safetensors")
        name = "state_dict.policy.lm.model.norm.weight"
        tensors[name] = tensors[name] + torch.finfo(torch.float32).eps
        save_file(tensors, parts / "checkpoint.safetensors")

    changed_step = changed(step, tmp_path, shift)
    assert main(["unpack", str(changed_step), "--run", "--out", str(tmp_path / "run")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "different: the weights before the update"


def test_a_strangers_code_is_not_run(step, tmp_path, monkeypatch, capsys):
    def name_code(parts: Path) -> None:
        file = parts / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["model"]["init_args"]["optimizer"] = {
            "class_path": "os.system",
            "init_args": {"command": "touch it_ran"},
        }
        file.write_text(yaml.safe_dump(config))

    monkeypatch.chdir(tmp_path)
    changed_step = changed(step, tmp_path, name_code)
    assert main(["unpack", str(changed_step), "--run", "--out", "run"]) == 2
    assert "'os.system' is not among the trusted modules" in capsys.readouterr().err
    assert not (tmp_path / "it_ran").exists()


def test_a_checkpoint_of_another_iteration_is_refused(step, tmp_path, capsys):
    def renumber(parts: Path) -> None:
        about = json.loads((parts / "pack.json").read_text())
        (parts / "pack.json").write_text(json.dumps(about | {"iteration": 2}))

    changed_step = changed(step, tmp_path, renumber)
    assert main(["unpack", str(changed_step), "--out", str(tmp_path / "run")]) == 1
    assert "is of version 2, but the update needs 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_step_whose_checkpoint_was_not_kept_is_packed(finished, tmp_path, capsys):
    out = tmp_path / "step.zip"
    told = ["--iteration", "4", "--texts", "hash", "--out", str(out)]
    assert main(["pack", str(finished), *told]) == 0
    assert "left out: texts of rollouts; their tokens are packed" in capsys.readouterr().out
    assert main(["unpack", str(out), "--run", "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"
    rollouts = RecordedRun(tmp_path / "run").log.rollouts(4)
    assert {len(r.completion) for r in rollouts} == {64}


def test_the_first_step_begins_with_the_models_own_weights(finished, tmp_path, capsys):
    out = tmp_path / "step.zip"
    assert main(["pack", str(finished), "--iteration", "1", "--out", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        assert "models/0/model.safetensors" in archive.namelist()
        assert "checkpoint.json" not in archive.namelist()
    assert main(["unpack", str(out), "--run", "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"


def with_other_embedding(model: Path, folder: Path) -> Path:
    """Return a copy of a model in which one tensor is another."""
    other = shutil.copytree(model, folder)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return other


def test_the_base_of_a_lora_is_packed_or_named(tiny_model, tmp_path, monkeypatch, capsys):
    place = make_place(tmp_path)
    finished = train(place, tiny_model, "--model.lora", "LoRA", "--model.kl", "null")
    stand_in(place, monkeypatch)
    pack = ["pack", str(finished), "--iteration", "3", "--out"]
    assert main([*pack, "whole.zip"]) == 0
    assert main([*pack, "adapters.zip", "--base", str(tiny_model)]) == 0
    names = load_file(tiny_model / "model.safetensors").keys()
    about = extract_archive(place / "adapters.zip", place / "parts")
    assert about["bases"]["models/0/model.safetensors"].keys() == names
    assert about["base"] == tiny_model.name
    assert load_file(place / "parts/models/0/model.safetensors") == {}
    assert main(["unpack", "whole.zip", "--run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"
    unpack = ["unpack", "adapters.zip", "--run"]
    assert main(unpack) == 2
    assert f"without the weights of '{tiny_model.name}'; name that" in capsys.readouterr().err
    other = with_other_embedding(tiny_model, place / "other")
    assert main([*unpack, "--base", str(other)]) == 2
    assert "'model.embed_tokens.weight' of models/0/model.safetensors is" in capsys.readouterr().err
    assert main([*unpack, "--base", str(tiny_model)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"


def test_what_a_base_has_is_left_out_of_whole_weights(finished, tiny_model, tmp_path, capsys):
    """The first step's model is the base but for a tensor, and a later step's reference is it."""
    other = with_other_embedding(tiny_model, tmp_path / "other")
    names = load_file(tiny_model / "model.safetensors").keys() - {"model.embed_tokens.weight"}
    for iteration, base, member, left_out in (
        ("1", other, "models/0/model", names),
        (
            "3",
            tiny_model,
            "checkpoint",
            {f"state_dict.reference.policy.lm.{name}" for name in names},
        ),
    ):
        folder = tmp_path / iteration
        told = ["--iteration", iteration, "--out", f"{folder}.zip", "--base", str(base)]
        assert main(["pack", str(finished), *told]) == 0
        about = extract_archive(Path(f"{folder}.zip"), folder / "parts")
        assert left_out <= about["bases"][f"{member}.safetensors"].keys()
        told = ["--run", "--base", str(base), "--out", str(folder / "run")]
        assert main(["unpack", f"{folder}.zip", *told]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"


def test_what_cannot_be_packed_is_said(finished, step, tiny_model, tmp_path, capsys):
    assert main(["pack", str(finished), "--iteration", "9"]) == 2
    said = capsys.readouterr().err
    assert "did not record the results of iteration 9 (recorded: 0, 1, 2, 3, 4)" in said
    base = ["--base", str(tiny_model)]
    assert main(["unpack", str(step), *base, "--out", str(tmp_path / "run")]) == 2
    assert f"--base {tiny_model}: the pack has none of its weights" in capsys.readouterr().err
    assert main(["pack", str(finished), "--iteration", "3", "--base", str(tmp_path)]) == 2
    assert f"{tmp_path} has no model.safetensors" in capsys.readouterr().err
    assert main(["pack", str(finished), "--iteration", "3", "--base", "nobody/nothing@1"]) == 2
    assert "--base nobody/nothing@1: its weights cannot be read" in capsys.readouterr().err
