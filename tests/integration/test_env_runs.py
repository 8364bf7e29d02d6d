"""Test runs in environments, as commands: they learn, go on after a kill, and say what goes wrong.

Slow: recipes that learn in environments run as commands, and some are killed and resumed.
"""

import json
import os
import signal
import threading

import pytest
import torch
import yaml
from tensordict import TensorDict

from benchmarks.kill.compare import differences
from benchmarks.support import forked
from lightning_rl import EntropyBonus
from lightning_rl.callbacks import RLCallback
from lightning_rl.cli import main
from lightning_rl.envs import ActorCritic, ActorCriticModule
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.envs.rows import rows_of
from tests.support import worlds
from tests.support.resumed import without_times


class KillSelf(RLCallback):
    """Ends the process with SIGKILL when the fifth iteration's update begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def configuration(world="Walk", **changed):
    env = {"class_path": "Gym", "init_args": {"name": f"tests.support.worlds:{world}-v0"}}
    config = {
        "seed_everything": 3,
        "trainer": {
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": {
                "class_path": "CSVLogger",
                "init_args": {"save_dir": "runs", "name": "", "version": "one"},
            },
            "callbacks": [
                {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 1}},
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 3}},
            ],
        },
        "model": {
            "class_path": "ActorCriticModule",
            "init_args": {
                "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
                "minibatches": 2,
            },
        },
        "data": {
            "class_path": "EnvDataModule",
            "init_args": {
                "env": env,
                "num_envs": 4,
                "frames_per_iteration": 84,  # 21 steps: episodes go on over iterations
                "iterations_per_epoch": 3,
                "eval_episodes": 4,
            },
        },
    }
    for key, value in changed.items():
        part, name = key.split("__")
        config[part]["init_args"][name] = value
    return config


def write(config, folder, name="config.yaml"):
    (folder / name).write_text(yaml.safe_dump(config))
    return name


def command(folder, *arguments):
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    status = forked.run("lightning_rl", ["fit", *arguments], said, folder=folder)
    return status, said.read_text()


def outcome(folder):
    """Return the last checkpoint's tensors, and the rows of metrics without times."""
    run = folder / "runs/one"
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    rows: dict[int, dict] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(without_times(row))
    return checkpoint["state_dict"], checkpoint["optimizer_states"], rows


MEMORY = {
    "agents": {
        "agent": {
            "body": {"class_path": "GRUBody", "init_args": {"hidden": 8}},
            "share_body": True,
        }
    }
}
KINDS = {
    "gym": {},
    "memory": {
        "model__agents": MEMORY["agents"],
        "model__clips": {"length": 7, "stride": 5, "num_samples": 8},
    },
}


def test_a_killed_run_goes_on_as_if_it_never_was(tmp_path):
    """Other kinds of runs and other places: tests/integration/test_resume.py."""
    config = configuration()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write(config, folder)
    assert command(whole, "--config", "config.yaml")[0] == 0
    config["trainer"]["callbacks"].append("tests.integration.test_env_runs.KillSelf")
    write(config, killed, "kill.yaml")
    status, said = command(killed, "--config", "kill.yaml")
    assert status == -signal.SIGKILL, said
    status, said = command(killed, "--config", "config.yaml", "--ckpt_path", "last")
    assert status == 0, said
    assert differences(outcome(killed), outcome(whole), "run") == []


def fit(folder, monkeypatch, config):
    monkeypatch.chdir(folder)
    return main(["fit", "--config", write(config, folder)])


def test_an_agent_learns_to_walk(tmp_path, monkeypatch, capsys):
    config = configuration(data__iterations_per_epoch=10, data__frames_per_iteration=256)
    assert fit(tmp_path, monkeypatch, config) == 0
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["model"] == "agent: MLPBody"
    assert summary["status"] == "completed"
    rows = outcome(tmp_path)[2]
    # From -2 to 2 it takes 7 to 3 steps to the right, at 1 each, to the end, which earns 5.
    assert rows[0]["eval/reward_mean"] < rows[20]["eval/reward_mean"]
    assert rows[20]["eval/reward_mean"] == 5 - rows[20]["eval/length_mean"]
    assert "held-out reward" in capsys.readouterr().out
    assert (tmp_path / "runs/one/curves.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "compiled"), [("bf16-mixed", False), ("32-true", True)])
def test_lightnings_precision_and_a_compiled_agent_learn(
    tmp_path, monkeypatch, precision, compiled
):
    config = configuration(model__compile=compiled, data__frames_per_iteration=256)
    config["trainer"]["precision"] = precision
    assert fit(tmp_path, monkeypatch, config) == 0
    rows = outcome(tmp_path)[2]
    assert rows[6]["eval/reward_mean"] > rows[0]["eval/reward_mean"]


@pytest.mark.slow
def test_only_a_memory_remembers(tmp_path, monkeypatch):
    learned = {}
    for kind in ("gym", "memory"):
        folder = tmp_path / kind
        folder.mkdir()
        options = KINDS[kind] | {"data__frames_per_iteration": 256}
        options |= {"data__iterations_per_epoch": 15, "data__eval_episodes": 20}
        if kind == "memory":
            options["model__clips"] = {"length": 8}
        assert fit(folder, monkeypatch, configuration("Remember", **options)) == 0
        learned[kind] = outcome(folder)[2][30]["eval/reward_mean"]
    # The first of 4 steps shows which is right; a guess earns half of the others.
    assert learned["gym"] < 3.4
    assert learned["memory"] > 3.8


@pytest.fixture
def released():
    """Lets go at the end of what hangs: its thread puts torch's generator back as it found it."""
    worlds.released.clear()
    yield
    worlds.released.set()
    for thread in threading.enumerate():
        if thread.name == "environments":
            thread.join(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "arguments", "words"),
    [
        ("Faulty", {"how": "raises"}, "in step 3 of its episode 0, seed"),
        ("Faulty", {"how": "nan"}, "gave [nan, 0.0] as observation at step 3 of the batch"),
        ("Faulty", {"how": "hangs"}, "a step took longer than max_step_seconds=0.5"),
    ],
)
def test_what_an_environment_does_wrong_is_one_line(
    tmp_path, monkeypatch, capsys, released, world, arguments, words
):
    config = configuration(data__eval_episodes=0, data__max_step_seconds=0.5)
    config["trainer"]["callbacks"].pop()
    config["data"]["init_args"]["env"]["init_args"] |= {
        "name": f"tests.support.worlds:{world}-v0",
        "arguments": arguments,
    }
    assert fit(tmp_path, monkeypatch, config) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["status"] == "failed"
    assert words in summary["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("data.num_envs", 5, "frames_per_iteration=84 must be a multiple of num_envs=5"),
        ("data.env.init_args.nam", "X", "no such key in Gym; did you mean name?"),
        ("model.agents", {"agnt": {}}, "has no agent 'agnt'; it has agent"),
        ("model.agents", {"agent": {"body": "MLPBdy"}}, "did you mean MLPBody?"),
        ("model.agents", {"agent": {"bdy": "MLPBody"}}, "did you mean body?"),
        ("model.agents", {"agent": {"body": "CNNBody"}}, "reads one observation with three dim"),
        (
            "model.agents",
            {"agent": {"policy": "GaussianHead"}},
            "does not support Discrete actions",
        ),
        ("model.clips", {"length": 4}, "clips are for bodies with a memory"),
        ("model.loss", "GSPO", "reads the column 'row'"),
        ("data.env", "TorchRLEnv", "make: is missing"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, path, value, words):
    config = configuration()
    part, *rest = path.split(".")
    tree = config[part]["init_args"]
    for name in rest[:-1]:
        tree = tree[name]
    tree[rest[-1]] = value
    assert fit(tmp_path, monkeypatch, config) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


class Keep(RLCallback):
    """Keeps each rank's first batch, and the weights before and after it."""

    def _save(self, trainer, pl_module, what, value):
        torch.save(value, f"{what}_{trainer.global_rank}.pt")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._save(trainer, pl_module, "batch", batch.to_dict())
        self._save(trainer, pl_module, "before", pl_module.state_dict())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._save(trainer, pl_module, "after", pl_module.state_dict())


@pytest.mark.slow
def test_two_processes_learn_as_one(tmp_path):
    """A step on both ranks' batches is that of one process on all of it."""
    config = configuration(
        data__iterations_per_epoch=1,
        data__eval_episodes=0,
        model__epochs=1,
        model__minibatches=1,
        model__entropy={"coef": 0.1},
        model__optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}},
    )
    config["trainer"] |= {"max_epochs": 1, "devices": 2, "strategy": "ddp"}
    keep = {"class_path": "tests.integration.test_env_runs.Keep"}
    config["trainer"]["callbacks"] = [config["trainer"]["callbacks"][0], keep]
    write(config, tmp_path)
    status, said = command(tmp_path, "--config", "config.yaml")
    assert status == 0, said
    kept = {
        f"{what}_{rank}": torch.load(tmp_path / f"{what}_{rank}.pt", weights_only=True)
        for what in ("batch", "before", "after")
        for rank in (0, 1)
    }
    batches = [TensorDict.from_dict(kept[f"batch_{rank}"], batch_size=[2, 21]) for rank in (0, 1)]
    module = ActorCriticModule(entropy=EntropyBonus(0.1))
    agent = ActorCritic()
    agent.build(Space({"observation": Observed((2,))}, {"action": Discrete(2)}))
    module.agents["agent"] = agent
    module.load_state_dict(kept["before_0"])
    rows, _ = rows_of(agent, "agent", torch.cat(batches), module.advantage)
    loss, _ = module._loss(*agent(rows.observations), rows, {}, torch.arange(84))
    loss.backward()
    for part in agent.separate_parts():
        torch.nn.utils.clip_grad_norm_(part, module.max_grad_norm)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for name, weight in module.state_dict().items():
        assert torch.equal(kept["after_0"][name], kept["after_1"][name])
        moved = (weight - kept["before_0"][name]).abs().max()
        assert moved > 0
        torch.testing.assert_close(kept["after_0"][name], weight, rtol=0, atol=1e-5, msg=name)
