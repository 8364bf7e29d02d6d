"""Test that a run is resumed as the same one: configuration, data, directory, weights."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_rl.callbacks import HFExport, IterationCheckpoint, RLCallback, WeightSync
from lightning_rl.cli import main
from lightning_rl.errors import ConfigError, NonFiniteWeightsError
from lightning_rl.learn import auto_micro_batches
from lightning_rl.models.memory import forward_tokens
from lightning_rl.run.files import rundir as runlock
from lightning_rl.run.files.checkpoint_io import newest_good, write_checkpoint
from lightning_rl.sync.schedule import FixedSchedule
from tests.support.bad_configs import CONFIG
from tests.support.small_run import adamw, data_module, grpo, trainer_of
from tests.support.tiers import slow

RUN = Path("runs", "one", "version_0")


@pytest.fixture
def run(workplace) -> Path:
    """Return a finished run of one iteration, whose configuration is ``run.yaml``."""
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "one"}}
    trainer = CONFIG["trainer"] | {"logger": logger, "enable_checkpointing": True}
    trainer["callbacks"] = ["WeightSync", "RunReport"]
    (workplace / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": trainer}))
    assert main(["fit", "--config", "run.yaml"]) == 0
    return workplace / RUN


def go_on(*options: str) -> int:
    return main(["fit", "--config", "run.yaml", "--ckpt_path", "last", *options])


MORE = ("--trainer.max_epochs", "2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.lora", "LoRA"], ["model.lora: none then, {'rank': 16", "set them back"]),
        slow(["--model.kl", "K3Penalty"], ["model.kl: none then, K3Penalty now"]),
        (
            ["--model.optimizer.lr", "0.5", "--data.group_size", "4"],
            ["model.optimizer.lr: 0.001 then, 0.5 now", "data.group_size: 2 then, 4 now"],
        ),
        slow(
            ["--data.rewards", "[my_rewards.needs_solution]"],
            ["data.rewards: ['my_rewards.length']"],
        ),
        slow(
            ["--data.sampling.temperature", "0.5"], ["data.sampling.temperature: 1.0 then, 0.5 now"]
        ),
    ],
)
def test_what_would_alter_the_run_is_refused_by_name(run, capsys, options, words):
    before = (run / "config.yaml").read_text()
    assert go_on(*MORE, *options) == 2
    said = capsys.readouterr().err
    message = said[said.index("lightning-rl: ") :]
    assert [word for word in words if word not in message] == []
    assert len(message.strip().splitlines()) == 1
    assert (run / "config.yaml").read_text() == before
    assert not list(run.glob("config_*.yaml"))


@pytest.mark.slow
def test_a_key_that_only_one_of_two_dictionaries_has_is_a_change(run, capsys):
    shutil.rmtree(run)
    columns = "--data.train_prompts.columns"
    assert main(["fit", "--config", "run.yaml", columns, "{one: answer}"]) == 0
    for now, said in (
        ("{one: answer, two: answer}", "two: none then, answer now"),
        ("{}", "one: answer then, none now"),
    ):
        assert go_on(*MORE, columns, now) == 2
        assert f"data.train_prompts.columns.{said}" in capsys.readouterr().err


@pytest.mark.slow
def test_other_rows_of_the_same_number_are_refused(run, workplace, capsys):
    lines = (workplace / "train.jsonl").read_text().splitlines()
    shutil.copy("train.jsonl", "same.jsonl")
    (workplace / "other.jsonl").write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    assert go_on(*MORE, "--data.train_prompts.path", "other.jsonl") == 2
    assert "data.train_prompts.content: 12 rows" in capsys.readouterr().err
    assert go_on(*MORE, "--data.train_prompts.path", "same.jsonl") == 0


@pytest.mark.slow
def test_what_is_allowed_holds_and_both_configurations_are_kept(run, capsys, caplog):
    before = (run / "config.yaml").read_text()
    changed = ("--model.optimizer.lr", "0.5", "--data.group_size", "4")
    assert go_on(*MORE, *changed, "--allow_changes", "[model.optimizer.lr]") == 2
    assert "data.group_size: 2 then, 4 now" in capsys.readouterr().err
    assert go_on(*MORE, *changed, "--allow_changes", "true") == 0
    said = caplog.text
    assert "trainer.max_epochs: 1 then, 2 now\n" in said
    assert "model.optimizer.lr: 0.001 then, 0.5 now (permitted by --allow_changes)" in said
    assert (run / "config.yaml").read_text() == before
    kept = yaml.safe_load((run / "config_1.yaml").read_text())
    assert kept["data"]["init_args"]["group_size"] == 4
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["policy/lr"] for r in rows if "policy/lr" in r] == pytest.approx([0.001, 0.5])
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert starts[1]["iteration"] == 1
    assert starts[1]["changed"]["data.group_size"] == [2, 4]
    checkpoint = torch.load(run / "checkpoints" / "iteration_2.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"]["run"]["configuration"]["data.group_size"] == 4


def test_what_auto_was_settled_to_is_in_the_configuration(run, monkeypatch):
    """The made-up GPU has room for 3 MB, at 1 KB a token: 2,550 tokens."""
    shutil.rmtree(run)
    monkeypatch.setattr(auto_micro_batches, "free_bytes", lambda device: 3_000_000)
    monkeypatch.setattr(
        auto_micro_batches,
        "peak_bytes",
        lambda compute, micro_batch, device: 1_000 * forward_tokens(micro_batch),
    )
    auto = ("--model.update.max_tokens_per_micro_batch", "auto")
    assert main(["fit", "--config", "run.yaml", *auto]) == 0

    def settled(name):
        model = yaml.safe_load((run / name).read_text())["model"]["init_args"]
        return model["update"]["max_tokens_per_micro_batch"]

    assert settled("config.yaml") == 2_048
    # Whoever goes on says auto again, which is what it was settled to.
    monkeypatch.setattr(
        auto_micro_batches, "free_bytes", lambda device: pytest.fail("measured again")
    )
    assert go_on(*auto) == 0
    assert not list(run.glob("config_*.yaml"))
    assert main(["rerun", str(run), "--iteration", "1"]) == 0
    assert go_on(*auto, *MORE) == 0
    assert settled("config.yaml") == settled("config_1.yaml") == 2_048


def test_a_new_schedule_is_where_it_would_have_been(tiny_model, tmp_path):
    def fit(rate: float, epochs: int, **options) -> list[float]:
        module = grpo(
            tiny_model,
            optimizer=adamw(rate),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        )
        module.allow_changes = options.pop("allow", False)
        callbacks = [WeightSync(), IterationCheckpoint(1)]
        trainer = trainer_of(tmp_path, callbacks, max_epochs=epochs, enable_checkpointing=True)
        data = data_module(groups_per_iteration=2, group_size=2, iterations_per_epoch=1)
        trainer.fit(module, data, ckpt_path="last")
        return [group["lr"] for group in trainer.optimizers[0].param_groups]

    assert fit(0.08, 1) == [0.04]
    with pytest.raises(ConfigError, match=r"model\.optimizer\.lr: 0\.08 then, 0\.8 now"):
        fit(0.8, 2)
    assert fit(0.8, 2, allow=["model.optimizer"]) == [pytest.approx(0.2)]  # 0.8 / 2 / 2


@pytest.mark.slow
def test_last_begins_the_same_run_under_another_name_and_names_the_one_beside_it(run):
    """A job script that is submitted twice does this."""
    told = (
        r"'last' found no checkpoint in runs/two/.*, so a new run begins; .*"
        r"iteration_1\.ckpt belongs to a run with the same configuration and another name"
    )
    with pytest.warns(UserWarning, match=told):
        assert go_on("--trainer.logger.name", "two") == 0
    # Another experiment beside it is none that one may have meant.
    with warnings.catch_warnings(record=True) as caught:
        assert go_on("--trainer.logger.name", "three", "--data.group_size", "4") == 0
    assert not [w for w in caught if "and another name" in str(w.message)]
    for name in ("one", "two", "three"):
        there = run.parents[1] / name / "version_0"
        assert (there / "checkpoints" / "iteration_1.ckpt").exists()


@pytest.mark.slow
def test_the_same_value_as_text_and_as_a_number_is_no_change(run, caplog):
    """``--trainer.devices 1`` on a command line is text, ``devices: 1`` of a file is a number."""
    configuration = yaml.safe_load(Path("run.yaml").read_text())
    configuration["trainer"] |= {"devices": 1, "max_epochs": 2}
    Path("run.yaml").write_text(yaml.safe_dump(configuration))
    assert go_on() == 0
    assert "trainer.devices: auto then, 1 now" in caplog.text
    caplog.clear()
    assert go_on("--trainer.devices", "1", "--trainer.max_epochs", "3") == 0
    assert "trainer.max_epochs: 2 then, 3 now" in caplog.text
    assert "trainer.devices" not in caplog.text


def test_the_newest_is_of_the_highest_iteration_and_of_this_run(run):
    checkpoints = run / "checkpoints"
    own = torch.load(checkpoints / "iteration_1.ckpt", weights_only=True)
    for iteration, number in ((2, own["lightning_rl"]["run"]["id"]), (9, "another run")):
        own["lightning_rl"]["run"]["id"] = number
        write_checkpoint(own, checkpoints / f"iteration_{iteration}.ckpt")
    os.utime(checkpoints / "iteration_2.ckpt", (1, 1))  # as after a copy
    name = json.loads((run / "run.json").read_text())["id"]
    with pytest.warns(UserWarning, match=r"iteration_9\.ckpt belongs to another run and is"):
        assert newest_good(checkpoints, name) == checkpoints / "iteration_2.ckpt"
    assert newest_good(checkpoints) == checkpoints / "iteration_9.ckpt"


HOLDS = """
import sys, pathlib
from lightning_rl.run.files.rundir import hold
hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_process_in_a_run_directory_is_refused(run, capsys):
    before = sorted(path.name for path in run.iterdir())
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        assert go_on(*MORE) == 2
        assert f"is in use by process {other.pid} on " in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"process {other.pid}"):
            runlock.hold(run)
        other.kill()
    assert sorted(path.name for path in run.iterdir()) == before
    assert go_on(*MORE) == 0  # a lock ends with its process


class Spoil(RLCallback):
    """One weight becomes NaN in the second update."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.iteration == 2:
            with torch.no_grad():
                next(pl_module.policy.parameters()).view(-1)[3] = torch.nan


@pytest.mark.parametrize(
    ("every", "doing"), [(9, "saved as"), (1, "pushed to the engine as version 2")]
)
def test_weights_that_are_nan_are_neither_saved_nor_pushed(tiny_model, tmp_path, every, doing):
    saver = IterationCheckpoint(1, keep_last=1, dirpath=str(tmp_path / "kept"))
    sync, export = WeightSync(schedule=FixedSchedule(every)), HFExport(str(tmp_path / "hf"))
    trainer = trainer_of(tmp_path, [Spoil(), sync, saver, export], enable_checkpointing=True)
    data = data_module(groups_per_iteration=2, group_size=2, iterations_per_epoch=3)
    with pytest.raises(NonFiniteWeightsError, match=rf"weights are NaN or infinite, .*{doing}"):
        trainer.fit(grpo(tiny_model), data)
    assert newest_good(tmp_path / "kept").name == "iteration_1.ckpt"
    assert os.readlink(tmp_path / "kept" / "last.ckpt") == "iteration_1.ckpt"
    assert not (tmp_path / "hf").exists()


class Diverge(Callback):
    """The second update leaves weights that are numbers, but of no use."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.iteration == 2:
            with torch.no_grad():
                for parameter in pl_module.policy.parameters():
                    parameter.mul_(self.factor)


@pytest.mark.parametrize(
    ("factor", "said"),
    [(1e30, "what is computed with them will be"), (1e15, "the trainer's own logprobs are NaN")],
)
def test_the_last_checkpoint_of_a_run_that_diverged_is_good(tiny_model, tmp_path, factor, said):
    saver = IterationCheckpoint(1, keep_last=1, dirpath=str(tmp_path / "kept"))
    trainer = trainer_of(
        tmp_path, [Diverge(factor), WeightSync(), saver], enable_checkpointing=True
    )
    data = data_module(groups_per_iteration=2, group_size=2, iterations_per_epoch=3)
    with pytest.raises(NonFiniteWeightsError, match=said):
        trainer.fit(grpo(tiny_model), data)
    assert newest_good(tmp_path / "kept").name == "iteration_1.ckpt"
