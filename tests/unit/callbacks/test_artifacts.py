"""Test RunArtifacts: which files a logger is handed, and when."""

import json
from typing import ClassVar

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

from lightning_rl.callbacks import RunArtifacts
from lightning_rl.callbacks.artifacts import keep_files
from lightning_rl.errors import ConfigError
from lightning_rl.run.files.rundir import run_dir
from tests.support.small_run import trainer_of
from tests.support.walker import Walker, Walks


class Keeper(CSVLogger):
    """Keeps what it is handed."""

    kept: dict[str, bytes]


@keep_files.register
def _(logger: Keeper, directory, files):
    logger.kept = {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


class Refuser(CSVLogger):
    """Has a server that is out of reach."""


@keep_files.register
def _(logger: Refuser, directory, files):
    raise ConnectionError("no route to host")


class Leaves(Callback):
    """Files of a user's own, and in the end perhaps an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, *rest):
        (run_dir(trainer) / "own" / "deep").mkdir(parents=True, exist_ok=True)
        (run_dir(trainer) / "own" / "note.txt").write_text("mine")
        if self.error is not None:
            raise self.error


def test_the_files_of_a_finished_run(tmp_path):
    logger = Keeper(tmp_path, "csv")
    trainer_of(tmp_path, [RunArtifacts(), Leaves()], logger=logger).fit(Walker(), Walks())
    assert list(logger.kept) == ["summary.json", "curves.png", "metrics.jsonl"]
    assert json.loads(logger.kept["summary.json"])["status"] == "completed"
    assert logger.kept["metrics.jsonl"].count(b"\n") == 3


def test_patterns_choose_and_a_folder_is_none_of_its_files(tmp_path):
    logger = Keeper(tmp_path, "csv")
    callbacks = [RunArtifacts(["own/*", "*.json", "summary.json"]), Leaves()]
    trainer_of(tmp_path, callbacks, logger=logger).fit(Walker(), Walks())
    assert list(logger.kept) == ["own/note.txt", "summary.json"]


def test_also_of_a_run_that_failed(tmp_path):
    logger = Keeper(tmp_path, "csv")
    callbacks = [RunArtifacts(), Leaves(ZeroDivisionError("planted"))]
    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, callbacks, logger=logger).fit(Walker(), Walks())
    summary = json.loads(logger.kept["summary.json"])
    assert (summary["status"], summary["error"]) == ("failed", "ZeroDivisionError: planted")


def test_a_logger_that_refuses_ends_no_run(tmp_path):
    loggers = [Refuser(tmp_path, "csv"), Keeper(tmp_path, "other")]
    trainer = trainer_of(tmp_path, [RunArtifacts()], logger=loggers)
    with pytest.warns(
        UserWarning, match=r"Refuser could not upload .* \(ConnectionError: no route"
    ):
        trainer.fit(Walker(), Walks())
    assert "summary.json" in loggers[1].kept


def test_mlflow_keeps_the_folders(tmp_path):
    class Client:
        calls: ClassVar[list] = []

        def log_artifact(self, run_id, local_path, artifact_path=None):
            self.calls.append((run_id, local_path, artifact_path))

    class Fake(MLFlowLogger):
        experiment, run_id = Client(), "17"

        def __init__(self):
            pass  # the package is not there

    files = [tmp_path / "summary.json", tmp_path / "hf" / "config.json"]
    keep_files(Fake(), tmp_path, files)
    assert Client.calls == [("17", str(files[0]), None), ("17", str(files[1]), "hf")]


def test_other_loggers_and_try_outs_are_left_alone(tmp_path):
    trainer_of(tmp_path, [RunArtifacts()]).fit(Walker(), Walks())
    trainer = trainer_of(tmp_path, [RunArtifacts()], logger=Keeper(tmp_path), fast_dev_run=1)
    trainer.fit(Walker(), Walks())


@pytest.mark.parametrize(
    ("files", "message"),
    [([], r"no files to upload; add patterns"), (["/etc/passwd"], r"'/etc/passwd' must be inside"),
     (["../*"], r"'\.\./\*' must be inside"), ([""], r"'' must be inside")],
)  # fmt: skip
def test_patterns_stay_in_the_run_directory(files, message):
    with pytest.raises(ConfigError, match=message):
        RunArtifacts(files)
