"""Several checkpoints in one test: what an evaluation while training found, with one engine."""

import json

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import RLTrainer, TransformersEngine
from lightning_rl.callbacks import Evaluate, IterationCheckpoint, RunReport
from lightning_rl.cli import main
from tests.support.small_run import data_module, grpo, trainer_of


@pytest.fixture
def starts(monkeypatch):
    """Return a list that grows by one with every engine that is started."""
    found, start = [], TransformersEngine.start

    def noting(self, *arguments, **options):
        found.append(self)
        return start(self, *arguments, **options)

    monkeypatch.setattr(TransformersEngine, "start", noting)
    return found


def test_each_has_what_its_own_evaluation_found(tiny_model, tmp_path, starts):
    report = RunReport()
    callbacks = [Evaluate(1), IterationCheckpoint(1, keep_last=3), report]
    options = {"iterations_per_epoch": 3, "groups_per_iteration": 2}
    trainer = trainer_of(tmp_path, callbacks, enable_checkpointing=True)
    trainer.fit(grpo(tiny_model), data_module(**options))
    wanted = {
        row["iteration"]: {k: v for k, v in row.items() if k.startswith("eval/")}
        for row in report.history
    }
    assert wanted[1] != wanted[3]

    starts.clear()
    folder = tmp_path / "csv/version_0/checkpoints"
    again = [*sorted(map(str, folder.glob("iteration_*.ckpt"))), str(folder / "iteration_1.ckpt")]
    tester = trainer_of(tmp_path, kind=RLTrainer, logger=CSVLogger(tmp_path, "tests"))
    rows = tester.test(grpo(tiny_model), datamodule=data_module(**options), checkpoints=again)
    assert len(starts) == 1
    assert [row["iteration"] for row in rows] == [1, 2, 3, 1]
    for row in rows:
        assert {k: v for k, v in row.items() if k.startswith("eval/")} == wanted[row["iteration"]]


@pytest.mark.slow
def test_from_the_command_line(workplace, capsys, starts):
    options = ["--config", "good.yaml", "--trainer.enable_checkpointing", "true"]
    options += ["--trainer.max_epochs", "2", "--trainer.callbacks+=IterationCheckpoint"]
    options += ["--trainer.callbacks.every_n_iterations", "1"]
    assert main(["fit", *options]) == 0
    [folder] = workplace.rglob("checkpoints")
    starts.clear()
    capsys.readouterr()

    assert main(["test", *options, "--checkpoints", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = [str(folder / f"iteration_{n}.ckpt") for n in (1, 2)]
    place = next(n for n, line in enumerate(lines) if line.startswith("checkpoint "))
    assert "eval/accuracy" in lines[place]
    rows, compared = lines[place + 1 : place + 3], lines[place + 3 :]
    assert [line.split()[0] for line in rows] == files
    assert compared[0].startswith(f"{files[1]} against {files[0]}: accuracy ")
    assert len(starts) == 1
    [table] = workplace.rglob("test.json")
    assert [row["checkpoint"] for row in json.loads(table.read_text())] == files

    listed = f"[{files[0]}, {folder / 'last.ckpt'}]"
    assert main(["test", *options, "--checkpoints", listed]) == 0
    assert f"{folder / 'last.ckpt'} " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["--checkpoints", "gone"], "config error: checkpoints: 'gone' does not exist"),
        (["--checkpoints", "empty"], "config error: checkpoints: 'empty' holds no *.ckpt"),
        (
            ["--checkpoints", "[train.jsonl]"],
            "'train.jsonl' cannot be used: train.jsonl is damaged",
        ),
        (["--checkpoints", "3"], "config error: checkpoints"),
    ],
)
def test_mistakes(workplace, capsys, starts, named, message):
    assert main(["test", "--config", "good.yaml", *named]) == 2
    assert message in capsys.readouterr().err
    assert starts == []


def test_an_agent_that_is_no_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything's, put back afterwards
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path), "max_epochs": 1}
    trainer |= {"callbacks": [{"class_path": "Evaluate"}], "logger": False}
    parts = {"model": {"class_path": "tests.support.walker.Walker"}, "trainer": trainer}
    file = tmp_path / "walk.yaml"
    file.write_text(json.dumps(parts | {"data": {"class_path": "tests.support.walker.Walks"}}))
    assert main(["fit", "--config", str(file)]) == 0
    run = tmp_path / "lightning_rl_runs" / "version_0"
    assert {"config.yaml", "summary.json", "curves.png", "run.json"} <= {
        p.name for p in run.iterdir()
    }
    capsys.readouterr()
    assert main(["test", "--config", str(file), "--checkpoints", str(run / "checkpoints")]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["3", "1.5"]
    assert main(["fit", "--config", str(file), "--trainer.callbacks+=WeightSync"]) == 2
    assert "WeightSync works only with language models, but Walker" in capsys.readouterr().err
