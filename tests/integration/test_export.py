"""Test HFExport: on the way and at the end, whole or not there."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from textwrap import indent

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl import IterablePrompts, LoRA, SFTDataModule, SFTModule
from lightning_rl.callbacks import (
    Evaluate,
    HFExport,
    RerunRecorder,
    RLCallback,
    RunReport,
    WeightSync,
    latest_hf_checkpoint,
)
from lightning_rl.data.rollouts.ledger import Ledger
from lightning_rl.errors import ConfigError, DiskError
from lightning_rl.models.export import ModelExport
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from lightning_rl.run.files.rundir import run_dir
from tests.support.small_run import SaveAfter, data_module, grpo, trainer_of


class Remember(RLCallback):
    """The weights after each iteration."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        policy = pl_module.loaded_policy
        self.weights[pl_module.iteration] = {n: w.clone() for n, w in policy.named_weights()}


def fitted(model, path, export, *callbacks, iterations=4, lora=None, ckpt_path=None):
    module = grpo(model, lora=lora)
    trainer = trainer_of(path, [WeightSync(), Evaluate(1), *callbacks, export, RunReport()])
    trainer.fit(module, data_module(iterations_per_epoch=iterations), ckpt_path=ckpt_path)
    return module, trainer


def same_weights(directory, weights):
    loaded = dict(Policy(str(directory)).named_weights())
    return all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_exports_on_the_way_are_of_their_iterations(tiny_model, tmp_path):
    seen = Remember()
    export = HFExport(str(tmp_path / "model"), every_n_iterations=1, keep_last=2)
    fitted(tiny_model, tmp_path, export, seen)
    there = tmp_path / "model_exports"
    assert sorted(path.name for path in there.iterdir()) == ["iteration_3", "iteration_4"]
    assert same_weights(there / "iteration_3", seen.weights[3])
    assert same_weights(tmp_path / "model", seen.weights[4])
    assert not same_weights(tmp_path / "model", seen.weights[3])
    assert AutoTokenizer.from_pretrained(there / "iteration_3").eos_token_id == 1


@pytest.mark.slow
def test_the_best_stays_and_is_linked(tiny_model, tmp_path):
    class Told(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.record({"told": {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.2}[pl_module.iteration]})

    export = HFExport(str(tmp_path / "model"), every_n_iterations=1, keep_last=1, monitor="told")
    fitted(tiny_model, tmp_path, export, Told())
    there = tmp_path / "model_exports"
    assert {path.name for path in there.iterdir()} == {"best", "iteration_2", "iteration_4"}
    assert (there / "best").resolve().name == "iteration_2"
    assert json.loads((there / "best/export.json").read_text())["iteration"] == 2


def test_a_monitor_that_nobody_records_is_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"HFExport\(monitor='eval/acuracy'\).*eval/accuracy"):
        fitted(tiny_model, tmp_path, HFExport(monitor="eval/acuracy"))


def printed(card, *places):
    """Return the blocks of Python in a card, with real places for those it leaves to the reader."""
    for name, place in zip(("this/folder", "merged"), places, strict=True):
        card = card.replace(f"path/to/{name}", str(place))
    return re.findall("```python\n(.*?)```", card, re.DOTALL)


def test_an_adapter_is_exported_by_itself(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_model.parent)  # from elsewhere, a relative name would say nothing
    name = tiny_model.name
    module, _ = fitted(name, tmp_path, HFExport(str(tmp_path / "model")), lora=LoRA(rank=4))
    monkeypatch.chdir(tmp_path)
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    # transformers loads the model that the configuration names, then the adapter.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged.load_state_dict(dict(module.loaded_policy.named_weights()))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        theirs = loaded(input_ids=ids).logits
        ours = merged(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    card = (tmp_path / "model/README.md").read_text()
    count = f"{sum(w.numel() for w in merged.parameters()):,}"
    [weights] = tiny_model.glob("*.safetensors")
    told = f"a {type(merged).__name__} of {count} parameters, `{weights.name}` with the SHA-256 "
    assert f"{told}`{sha256(weights.read_bytes()).hexdigest()}`" in card
    load, _, merge, train = printed(card, tmp_path / "model", tmp_path / "merged")
    names = {}
    exec(load, names)
    with torch.no_grad():
        loaded = names["model"](input_ids=ids).logits
    torch.testing.assert_close(loaded, ours, rtol=1e-5, atol=1e-5)
    exec(merge + train, names)
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(names["module"].model)(input_ids=ids).logits
    torch.testing.assert_close(own, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_vllm_loads_an_adapter_as_its_card_says(tiny_model, tmp_path):
    fitted(tiny_model, tmp_path, HFExport(str(tmp_path / "model")), lora=LoRA(rank=4))
    card = (tmp_path / "model/README.md").read_text()
    _, vllm, _, _ = printed(card, tmp_path / "model", tmp_path / "merged")
    end = "\nassert answers[0].lora_request.lora_path\n"
    (tmp_path / "load.py").write_text(f"if __name__ == '__main__':\n{indent(vllm + end, '    ')}")
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run([sys.executable, tmp_path / "load.py"], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("folder", "options", "base"),
    [
        ("hub/models--me--base/snapshots/0a1b", {}, ("me/base", "0a1b")),
        ("me/base", {"revision": "v2"}, ("me/base", "v2")),
        (None, {}, ("me/base", None)),
    ],
    ids=["cached", "named", "object"],
)
def test_an_adapter_names_its_base_as_the_hub_does(
    tiny_model, tmp_path, monkeypatch, folder, options, base
):
    monkeypatch.chdir(tmp_path)
    if folder is None:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.config.name_or_path = "me/base"
        policy = Policy((model, AutoTokenizer.from_pretrained(tiny_model)), lora=LoRA(rank=4))
    else:
        shutil.copytree(tiny_model, folder)
        policy = Policy(folder, lora=LoRA(rank=4), loading=Loading(model_kwargs=options))
    if folder == "me/base":
        shutil.rmtree("me")  # which only stood in for the hub
    ModelExport(policy, merge_adapters=False).write("out")
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == base


@pytest.mark.slow
def test_an_adapter_is_merged_on_request(tiny_model, tmp_path):
    export = HFExport(str(tmp_path / "model"), merge_adapters=True)
    module, _ = fitted(tiny_model, tmp_path, export, lora=LoRA(rank=4))
    assert same_weights(tmp_path / "model", dict(module.loaded_policy.named_weights()))


def test_adapters_that_are_not_all_are_refused_before_training(tiny_model, tmp_path):
    lora = LoRA(rank=4, options={"bias": "all"})
    with pytest.raises(ConfigError, match=r"bias='all'.*merge_adapters: true"):
        fitted(tiny_model, tmp_path, HFExport(), lora=lora)


@pytest.mark.slow
def test_the_card_tells_the_run(tiny_model, tmp_path):
    _, trainer = fitted(tiny_model, tmp_path, HFExport(str(tmp_path / "model")), RerunRecorder())
    text = (tmp_path / "model/README.md").read_text(encoding="utf-8")
    heads = [entry["hash"] for entry in Ledger(run_dir(trainer)).entries()]
    assert re.search("--head (.*)", text)[1] in heads
    [report] = [c for c in trainer.callbacks if isinstance(c, RunReport)]
    data = yaml.safe_load(text.split("---")[1])
    assert data["library_name"] == "transformers"
    assert "base_model" not in data  # a folder of this machine is no name on the hub
    assert "After 4 iterations" in text
    rewards = [row["eval/reward_mean"] for row in report.history]
    assert f"| held-out reward | {rewards[0]:.3g} | {rewards[-1]:.3g} |" in text
    assert (tmp_path / "model/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_of_before(tiny_model, tmp_path):
    class Told(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.record({"told": float(pl_module.iteration == 1)})

    def export():
        return HFExport(str(tmp_path / "model"), 1, keep_last=1, monitor="told")

    saved = tmp_path / "two.ckpt"
    fitted(tiny_model, tmp_path / "one", export(), Told(), SaveAfter(2, saved))
    shutil.rmtree(tmp_path / "model_exports/iteration_4")
    fitted(tiny_model, tmp_path / "two", export(), Told(), ckpt_path=saved)
    there = tmp_path / "model_exports"
    assert {path.name for path in there.iterdir()} == {"best", "iteration_1", "iteration_4"}
    assert (there / "best").resolve().name == "iteration_1"


def test_a_disk_that_refuses_fails_the_run_with_one_message(tiny_model, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_rl.models.export.ModelExport.write", full)
    with pytest.raises(DiskError, match="iteration_1 could not be written: No space left"):
        fitted(tiny_model, tmp_path, HFExport(every_n_iterations=1))


KILLED = """
import sys
from pathlib import Path

from lightning_rl.callbacks import HFExport, WeightSync
from tests.support.small_run import data_module, grpo, trainer_of

model, path = sys.argv[1:]
export = HFExport(str(Path(path) / "model"), every_n_iterations=1, keep_last=1)
trainer = trainer_of(Path(path), [WeightSync(), export])
trainer.fit(grpo(model), data_module(iterations_per_epoch=200))
"""


@pytest.mark.slow
def test_a_killed_run_leaves_a_whole_export(tiny_model, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tiny_model), str(tmp_path)])
    try:
        while not list((tmp_path / "model_exports").glob("iteration_[3-9].partial")):
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    found = latest_hf_checkpoint(tmp_path / "model")
    assert found is not None
    assert found.name.startswith("iteration_")
    assert all(bool(w.isfinite().all()) for _, w in Policy(str(found)).named_weights())


def test_supervised_training_is_exported_by_optimizer_steps(tiny_model, tmp_path):
    """Two batches of one row each make a step, of four rows."""
    rows = [{"prompt": f"{n}", "completion": "2"} for n in range(4)]
    trainer = trainer_of(tmp_path, [HFExport(every_n_iterations=1)])
    trainer.accumulate_grad_batches = 2
    trainer.fit(SFTModule(str(tiny_model)), SFTDataModule(IterablePrompts(rows), batch_size=1))
    exported = {path.name for path in tmp_path.rglob("iteration_*") if path.is_dir()}
    assert trainer.global_step >= 2
    assert exported == {f"iteration_{n}" for n in range(1, trainer.global_step + 1)}
