"""fit in the layout that was fastest: kept in its configuration, by a resume and by a rerun."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl import JSONLPrompts, PolicyModule, RLDataModule, Sampling, TransformersEngine
from lightning_rl.cli import fastest, main
from lightning_rl.run.layout_cache import Seconds
from recipes.sort_digits.reward import exact_match
from tests.support.small_run import trainer_of

pytestmark = pytest.mark.slow

ALONE = "1 process, 1 thread, TransformersEngine"


@pytest.fixture
def place(tmp_path, tiny_model, monkeypatch):
    """Where a user stands who chose neither processes nor threads nor engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_RL_LAYOUT", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # put back as it was
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(fastest, "WORTH", 2)
    monkeypatch.setattr(fastest, "BUSY", 1e9)
    monkeypatch.setattr(fastest, "usable_cores", lambda: 2)
    monkeypatch.setattr(fastest, "find_spec", lambda name: object())  # vLLM is there
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(30, 42)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("config.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {
                    "class_path": "PolicyModule",
                    "init_args": {
                        "model": str(tiny_model),
                        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
                    },
                },
                "data": {
                    "class_path": "RLDataModule",
                    "init_args": {
                        "train_prompts": "train.jsonl",
                        "rewards": ["recipes.sort_digits.reward.exact_match"],
                        "sampling": {"max_tokens": 4},
                        "group_size": 2,
                        "groups_per_iteration": 4,
                        "iterations_per_epoch": 3,
                    },
                },
                "trainer": {
                    "accelerator": "cpu",
                    "max_epochs": 1,
                    "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}},
                    "callbacks": [
                        {
                            "class_path": "IterationCheckpoint",
                            "init_args": {"every_n_iterations": 1},
                        }
                    ],
                },
            }
        )
    )
    return tmp_path


def fit(*options: str, threads: str | None = None) -> None:
    """As a process of its own would start, which no earlier run has told its threads."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    assert main(["fit", "--config", "config.yaml", *options]) == 0


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def saved(run: str) -> tuple[object, ...]:
    config = yaml.safe_load(Path(run, "config.yaml").read_text())
    engine = config["data"]["init_args"]["engine"]
    name = None if engine is None else engine["class_path"].rpartition(".")[2]
    return config["layout"], str(config["trainer"]["devices"]), config["threads"], name


def test_the_layout_is_kept_by_the_configuration_a_resume_and_a_rerun(place, monkeypatch):
    two = "1 process, 2 threads, TransformersEngine"
    times: list[dict[str, Seconds]] = [
        {name: {"iteration": s, "generate": 0.2} for name, s in ((ALONE, 1.0), (two, 1.5))}
    ]
    monkeypatch.setattr(fastest, "measure", lambda trials, seconds: times.pop())
    fit()
    runs = "runs/lightning_logs/version_"
    assert saved(f"{runs}0") == ("plain", "1", 1, "TransformersEngine")
    # From here on measuring would fail, and an earlier run's answer is read.
    fit("--trainer.logger.name", "again", "--trainer.max_steps", "2")
    again = "runs/again/version_0"
    assert saved(again) == saved(f"{runs}0")
    # Without the cache too: the checkpoint tells.
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "another"))
    fit("--trainer.logger.name", "again", "--ckpt_path", "last")
    last = "checkpoints/iteration_3.ckpt"
    one, other = weights_of(Path(runs + "0", last)), weights_of(Path(again, last))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert saved(again) == saved(f"{runs}0")
    assert main(["rerun", f"{runs}0", "--iteration", "2"]) == 0
    # A run's own configuration is not laid out anew.
    config = f"{runs}0/config.yaml"
    assert main(["fit", "--config", config, "--trainer.logger.name", "copy"]) == 0
    assert saved("runs/copy/version_0") == saved(f"{runs}0")


def test_plain_measures_nothing_and_changes_nothing(place, monkeypatch):
    monkeypatch.setattr(fastest, "measure", lambda trials, seconds: pytest.fail("measured"))
    engine = ("--data.engine", "TransformersEngine")
    fit("--layout", "plain", *engine)
    assert saved("runs/lightning_logs/version_0") == ("plain", "auto", None, "TransformersEngine")


def test_real_trials_take_no_part_in_the_run(place, monkeypatch):
    """One of a thread, and one of two processes: the run is as it is where all is given.

    The second need not come to an end: here they are forked off a process with threads of others.
    """
    monkeypatch.setattr(fastest, "BUDGET_S", 30.0)
    found = []

    def measure(trials, seconds):
        found.append(real(trials, seconds))
        return {name: row | {"iteration": row["iteration"] * (1 if name == ALONE else 1000)}
                for name, row in found[0].items()}  # fmt: skip

    real = fastest.measure
    monkeypatch.setattr(fastest, "measure", measure)
    fit(threads="1")
    assert list(found[0])[:1] == [ALONE]
    assert set(found[0]) <= {ALONE, "2 processes, 1 thread each, TransformersEngine"}
    assert all(0 < row["generate"] < row["iteration"] for row in found[0].values())
    given = ("--trainer.devices", "1", "--threads", "1", "--data.engine", "TransformersEngine")
    fit("--layout", "plain", *given)
    one, other = (
        weights_of(Path(f"runs/lightning_logs/version_{n}/checkpoints/last.ckpt")) for n in (0, 1)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_script_is_told_what_was_faster(place, tiny_model, monkeypatch, caplog):
    """By what a run of the command line measured of the same model and batch."""
    two = "1 process, 2 threads, TransformersEngine"
    times = {ALONE: {"iteration": 1.5, "generate": 0.2}, two: {"iteration": 1.0, "generate": 0.2}}
    monkeypatch.setattr(fastest, "measure", lambda trials, seconds: times)
    fit("--trainer.max_steps", "1")
    caplog.clear()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("lightning_rl.callbacks.layout_hint.usable_cores", lambda: 2)
    threads = torch.get_num_threads()
    try:
        for here, told in ((1, True), (2, False)):
            torch.set_num_threads(here)
            script(str(tiny_model), place)
            lines = [line for line in caplog.messages if line.startswith("layout: ")]
            assert bool(lines) is told, lines
            if told:
                [line] = lines
                assert line == (
                    f"layout: {two} took 1 s per iteration on this machine, {ALONE}, as here, "
                    "1.5 s: OMP_NUM_THREADS=2, Trainer(devices=1), "
                    "RLDataModule(engine=TransformersEngine())"
                )
            caplog.clear()
    finally:
        torch.set_num_threads(threads)


def script(model: str, place: Path) -> None:
    """The configuration's run, put together by hand."""
    data = RLDataModule(
        JSONLPrompts("train.jsonl"),
        [exact_match],
        TransformersEngine(),
        sampling=Sampling(max_tokens=4),
        group_size=2,
        groups_per_iteration=4,
        iterations_per_epoch=1,
    )
    module = PolicyModule(model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    trainer_of(place).fit(module, data)
