"""Test that packs shrink to what shows the symptom, and that what is left shows it again."""

import json
import math
import re
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file

from lightning_rl.cli import main
from lightning_rl.cli.pack.archive import extract_archive
from lightning_rl.cli.pack.observation import Observation
from lightning_rl.cli.pack.trees import read_tree
from lightning_rl.data.rollouts.log import RerunLog
from tests.support.packs import with_number
from tests.support.recorded_run import stand_in, train

UPDATE = "{minibatches: 1, ppo_epochs: 2, max_grad_norm: 0.01}"

pytestmark = pytest.mark.usefixtures("there")


@pytest.fixture(scope="module")
def step(place, tiny_model) -> Path:
    """Return a pack of iteration 3: twelve rollouts in three groups, two optimizer steps."""
    run = train(place, tiny_model, f"--model.update={UPDATE}")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(place, patch)
        assert main(["pack", str(run), "--iteration", "3", "--out", "step.zip"]) == 0
    return place / "step.zip"


def shrunk(pack: Path, folder: Path, capsys) -> tuple[int, list[str]]:
    told = ["--shrink", str(folder / "small.zip"), "--out", str(folder / "run")]
    status = main(["unpack", str(pack), *told])
    return status, capsys.readouterr().out.splitlines()


def test_gradients_are_observed_before_they_are_clipped(step, tmp_path):
    extract_archive(step, tmp_path / "parts")
    seen = Observation.of(read_tree(tmp_path / "parts/expected"))
    norms = [math.hypot(*of_step.values()) for of_step in seen.gradients]
    recorded = RerunLog(tmp_path / "parts").outcomes()[3].metrics["policy/grad_norm"]
    assert min(norms) > 0.02
    assert fmean(norms) == pytest.approx(recorded, rel=1e-4)  # both are summed in 32 bits or more


def test_a_nan_is_left_in_one_layer_and_one_rollout(step, tmp_path, capsys):
    name = "state_dict.policy.lm.model.layers.1.mlp.up_proj.weight"
    broken = with_number(step, tmp_path, "checkpoint", name, 0, math.nan)
    status, said = shrunk(broken, tmp_path, capsys)
    assert status == 0, said
    assert re.fullmatch("groups: 1 of 3 stay, [1-9] trials", said[-4])
    assert re.fullmatch(r"rollouts: 1 of 4 stay, \d+ trials", said[-3])
    assert said[-2] == "layers: 1 of 2 stay, 2 trials"
    small = tmp_path / "small.zip"
    assert small.stat().st_size < 0.7 * step.stat().st_size  # embeddings and norms stay
    assert main(["unpack", str(small), "--run", "--out", str(tmp_path / "again")]) == 0
    *_, symptom, verdict = capsys.readouterr().out.splitlines()
    assert symptom.startswith("symptom: not finite: column old_logprobs, rollout 3/")
    assert verdict == "equal to the bit"
    about = json.loads(extracted(small, tmp_path / "last", "pack.json"))
    assert about["left_out"][-1].startswith(
        "11 of 12 rollouts and 1 of 2 layers, without which the symptom stays: not finite: column"
    )
    [config] = (tmp_path / "last/models").glob("*/config.json")
    assert json.loads(config.read_text())["num_hidden_layers"] == 1


@pytest.mark.slow
def test_a_nan_in_a_lora_is_left_in_one_layer_without_the_base(place, tiny_model, tmp_path, capsys):
    run = train(place, tiny_model, f"--model.update={UPDATE}", "--model.lora=LoRA")
    base, step = ["--base", str(tiny_model)], tmp_path / "step.zip"
    assert main(["pack", str(run), "--iteration", "3", "--out", str(step), *base]) == 0
    extract_archive(step, tmp_path / "whole")
    names = load_file(tmp_path / "whole/checkpoint.safetensors")
    name = next(n for n in names if n.startswith("state_dict") and ".layers.1." in n)
    broken = with_number(step, tmp_path, "checkpoint", name, 0, math.nan)
    small = tmp_path / "small.zip"
    told = ["--shrink", str(small), "--out", str(tmp_path / "run")]
    assert main(["unpack", str(broken), *told, *base]) == 0
    assert "layers: 1 of 2 stay, 2 trials" in capsys.readouterr().out
    about = json.loads(extracted(small, tmp_path / "last", "pack.json"))
    assert len(about["bases"]["models/0/model.safetensors"]) > 3
    told = ["--run", "--out", str(tmp_path / "again")]
    assert main(["unpack", str(small), *told, *base]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"


def extracted(pack: Path, folder: Path, member: str) -> str:
    extract_archive(pack, folder)
    return (folder / member).read_text()


def test_a_difference_is_left_in_its_rollout(step, tmp_path, capsys):
    extract_archive(step, tmp_path / "whole")
    rollouts = RerunLog(tmp_path / "whole").rollouts(3)
    rewards = {
        r.group_id: {o.reward for o in rollouts if o.group_id == r.group_id} for r in rollouts
    }
    place = next(n for n, r in enumerate(rollouts) if len(rewards[r.group_id]) > 1)
    lengths = [len(r.prompt.token_ids) + r.length for r in rollouts]
    token = sum(lengths[:place]) + len(rollouts[place].prompt.token_ids)
    other = with_number(step, tmp_path, "expected", "columns.old_logprobs", token, -9.0)
    status, said = shrunk(other, tmp_path, capsys)
    assert status == 0, said
    verdict = f"different: column old_logprobs, rollout {rollouts[place].id}, token 0"
    assert verdict in said
    assert said[-2].startswith("layers: all stay, since what the other machine would get")
    small = tmp_path / "small.zip"
    assert main(["unpack", str(small), "--run", "--out", str(tmp_path / "again")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    kept = RerunLog(tmp_path / "again").rollouts(3)
    assert len(kept) == 2  # alone it would have no advantage
    assert rollouts[place].id in {rollout.id for rollout in kept}


def test_a_sound_pack_is_not_shrunk(step, tmp_path, capsys):
    status, said = shrunk(step, tmp_path, capsys)
    assert status == 1
    assert said[-1].startswith("the update has no symptom")
    assert not (tmp_path / "small.zip").exists()
