"""Test what hears of a staged run: loggers, their stores of files, and callbacks; and its name."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from lightning_rl.callbacks.artifacts import keep_files
from lightning_rl.cli import main
from lightning_rl.games.staged.callbacks import STATE_FILES, StagedCallback
from tests.support.staged_runs import staged


class Memory(Logger):
    """Keeps all in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict] = {}
        self.kept: list[dict[str, bytes]] = []
        self.status = ""

    name = "memory"
    version = 0

    def log_hyperparams(self, params, *args, **kwargs):
        raise AssertionError

    def log_metrics(self, metrics, step=None):
        self.rows[step] = self.rows.get(step, {}) | metrics

    def finalize(self, status):
        self.status = status


@keep_files.register
def _(logger: Memory, directory, files):
    logger.kept.append(
        {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}
    )


class Unreachable(Memory):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no route\nto host")

    def finalize(self, status):
        raise ConnectionError("no route")


def test_any_logger_gets_the_metrics_and_keeps_the_state(server, tmp_path):
    memory = Memory()
    csv = CSVLogger(tmp_path, name="csv", version=0)
    staged(tmp_path / "run", server.url, logger=[memory, csv]).fit()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [{"iteration": step} | row for step, row in memory.rows.items()] == rows
    assert memory.status == "success"
    lines = (tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 5  # of two stages in each iteration, and the last test
    assert "eval/accuracy" in lines[0]
    # After each iteration what one goes on with, in the end all.
    *during, last = memory.kept
    assert [json.loads(files["state.json"])["iteration"] for files in during] == [1, 2]
    assert {"state.json", "metrics.jsonl", "summary.json", "rollouts.jsonl"} <= last.keys()
    assert json.loads(last["state.json"])["stage"] == "done"


def test_a_run_goes_on_from_what_a_logger_kept(server, tmp_path):
    memory = Memory()
    first = staged(tmp_path / "run", server.url, logger=memory, iterations=1).fit()
    there = tmp_path / "there"
    there.mkdir()
    for name, text in memory.kept[0].items():
        (there / name).write_bytes(text)
    state = staged(there, server.url).fit()
    assert state.run == first.run
    assert state.groups["all"].models == ["gpt", "ft:gpt+", "ft:gpt++"]
    assert len(server.jobs) == 2


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Write W&B runs into folders, without a server; `wandb sync` would upload them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return tmp_path / "wandb"


@pytest.mark.parametrize("own", [None, "chosen"])
def test_a_resumed_run_keeps_its_id_at_wandb(server, tmp_path, offline, own):
    wandb, states = pytest.importorskip("wandb"), []
    for iterations in (1, 2):
        logger = WandbLogger(save_dir=str(tmp_path), offline=True, id=own)
        options = {"logger": logger, "iterations": iterations}
        states.append(staged(tmp_path / "run", server.url, **options).fit())
        wandb.finish()
        assert logger.version == (own or states[0].run)
    assert states[1].run == states[0].run
    runs = [folder.name.split("-")[3] for folder in offline.glob("offline-run-*")]
    assert set(runs) == {own or states[0].run}


def test_a_run_goes_on_from_its_state_at_wandb(server, tmp_path, monkeypatch, capsys):
    """W&B's server is replaced: its answer is the files that the run handed to the logger."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    Path("staged.yaml").write_text(yaml.safe_dump(configuration(server.url)))
    assert main(["staged", "--config", "staged.yaml"]) == 0
    run, asked = json.loads(Path("runs/parity/state.json").read_text())["run"], []

    class Artifact:
        def download(self, root):
            for name in STATE_FILES:
                shutil.copy(Path("runs/parity", name), root)

    class Api:
        def artifact(self, name, type):
            asked.append((name, type))
            return Artifact()

    monkeypatch.setattr(wandb, "Api", Api)
    stored = f"--from_wandb=lab/games/{run}"
    assert main(["staged", stored, "--run_dir", "there", "--iterations", "2"]) == 0
    assert asked == [(f"lab/games/results-{run}:latest", "results")]
    there = json.loads(Path("there/state.json").read_text())
    assert (there["run"], there["iteration"], there["stage"]) == (run, 2, "done")
    assert not list(Path("there").glob(".fetched-*"))
    assert main(["staged", stored, "--run_dir", "there"]) == 2
    assert "there holds a run already" in capsys.readouterr().err


def test_a_state_that_wandb_does_not_give_is_told(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of no keys
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["staged", "--from_wandb", "lab/games/1234"]) == 2
    assert "W&B does not give the files of the run 'lab/games/1234'" in capsys.readouterr().err
    assert os.listdir("1234") == []


def test_a_logger_that_is_out_of_reach_is_a_warning(server, tmp_path):
    with pytest.warns(
        UserWarning, match=r"Unreachable failed to record the metrics .*no route to host"
    ):
        state = staged(tmp_path, server.url, logger=Unreachable(), iterations=1).fit()
    assert state.done


class Lengths(StagedCallback):
    """Statistics of one's own."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.ended: list[BaseException | None] = []

    def statistics(self, trainer, of, iteration, trees):
        turns = [len(leaf.conversation.turns) for tree in trees for leaf in tree.leaves]
        return {"turns": sum(turns) / len(turns)}

    def on_stage_end(self, trainer, stage):
        saved = json.loads((trainer.run_dir / "state.json").read_text())
        assert saved["stage"] == trainer.state.stage
        self.stages.append(stage)

    def on_run_end(self, trainer, error):
        self.ended.append(error)


def test_callbacks_add_statistics_and_hear_of_stages(server, tmp_path):
    own, memory = Lengths(), Memory()
    staged(tmp_path, server.url, callbacks=[own], logger=memory, iterations=1).fit()
    first, last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert (first["train/turns"], first["eval/turns"], last["eval/turns"]) == (2, 2, 2)
    assert memory.rows[0]["train/turns"] == 2
    assert own.stages == [
        "sample_rollouts", "log_stats", "test_during_training", "create_fine_tune_jobs",
        "await_fine_tune_jobs", "sample_rollouts", "test",
    ]  # fmt: skip
    assert own.ended == [None]


def test_callbacks_hear_that_it_failed(server, tmp_path):
    own, memory = Lengths(), Memory()
    server.fail("POST /v1/files", 401)
    with pytest.raises(Exception, match="answered 401") as caught:
        staged(tmp_path, server.url, callbacks=[own], logger=memory).fit()
    assert own.ended == [caught.value]
    assert memory.status == "failed"


# ---------------------------------------------------------------- the command


def configuration(url: str, **options) -> dict:
    """Return a configuration as the docs write it: classes by their names alone."""
    api = {"base_url": url, "api_key_env": None, "first_wait_s": 0.0, "retries": 1}
    prompts = {
        "prover": {"user": "Prove that {number} is {kind}."},
        "verifier": {"user": "{number} is {kind}. Is it even?"},
    }
    rows = [{"number": n, "kind": ["even", "odd"][n % 2], "label": 1 - n % 2} for n in range(6)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "run_dir": "runs/parity",
        "protocol": {"class_path": "Nip", "init_args": {"max_message_rounds": 2}},
        "scenario": {"class_path": "TextScenario", "init_args": {"prompts": prompts}},
        "train": {"class_path": "JSONLPrompts", "init_args": {"path": "rows.jsonl"}},
        "groups": {
            "all": {
                "agents": ["prover", "verifier"],
                "model": "gpt",
                "chat": {"class_path": "OpenAIChat", "init_args": api},
                "jobs": {"class_path": "OpenAIFineTuning", "init_args": api},
            }
        },
        "algorithm": "ExpertIteration",
        "min_rows": 1,
        "poll_s": 0.0,
        "seed": 3,
    } | options


@pytest.mark.parametrize("algorithm", ["ExpertIteration", "MALT"])
def test_the_short_form_of_the_docs_goes_on_and_is_found_by_name(
    server, tmp_path, monkeypatch, capsys, algorithm
):
    monkeypatch.chdir(tmp_path)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}
    config = configuration(server.url, algorithm=algorithm, logger=logger)
    Path("staged.yaml").write_text(yaml.safe_dump(config))
    assert main(["staged", "--config", "staged.yaml"]) == 0
    kept = Path("runs/parity/config.yaml").read_text()
    assert "object at 0x" not in kept
    assert list(Path("logs").rglob("metrics.csv"))
    run = json.loads(Path("runs/parity/state.json").read_text())["run"]

    assert main(["staged", "--config", "staged.yaml"]) == 0  # nothing is left to do
    assert main(["staged", "--name", "parity", "--iterations", "2"]) == 0
    assert main(["staged", f"--name={run}", "--iterations", "3"]) == 0
    state = json.loads(Path("runs/parity/state.json").read_text())
    assert (state["run"], state["iteration"], state["stage"]) == (run, 3, "done")
    assert len(server.jobs) == (1 if algorithm == "MALT" else 3)  # then all answers are alike
    test = {"class_path": "JSONLPrompts", "init_args": {"path": "rows.jsonl"}}
    capsys.readouterr()
    assert main(["staged", "--name", "parity", "--retest", "--retest_dir", "again", "--test",
                 json.dumps(test)]) == 0  # fmt: skip
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert sorted(os.listdir("again")) == [".lock", "retests.json", "retests.jsonl"]


def test_a_name_that_no_run_or_two_have_is_told(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["staged", "--name", "parity"]) == 2
    assert "--name parity: no run has this name" in capsys.readouterr().err
    for place in ("a/parity", "b/parity"):
        Path(place).mkdir(parents=True)
        for name in ("state.json", "config.yaml"):
            Path(place, name).write_text("{}")
    assert main(["staged", "--name", "parity"]) == 2
    assert "2 runs have this name" in capsys.readouterr().err
    assert main(["staged", "--name"]) == 2
    assert "--name needs a value" in capsys.readouterr().err


def test_a_damaged_configuration_of_a_run_is_told(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("staged.yaml").write_text(yaml.safe_dump(configuration(server.url)))
    Path("runs/parity").mkdir(parents=True)
    Path("runs/parity/config.yaml").write_text("a: [1\nb: 2")
    assert main(["staged", "--config", "staged.yaml"]) == 2
    assert "runs/parity/config.yaml:2: not valid YAML" in capsys.readouterr().err
