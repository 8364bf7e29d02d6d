"""A fast dev run leaves everything as it was, and results always have a run directory."""

from pathlib import Path

import pytest
import yaml

from lightning_rl.cli import main
from lightning_rl.sync.checkpoint import CheckpointTransport
from tests.support.bad_configs import CONFIG, files

OWN_PLACES = [
    "RunReport",
    "PreviewTable",
    "RolloutRecorder",
    "RerunRecorder",
    {"class_path": "HFExport", "init_args": {"directory": "model"}},
    {"class_path": "IterationCheckpoint", "init_args": {"dirpath": "kept"}},
]


@pytest.fixture
def configuration(workplace):
    """Write a configuration as users have it: several callbacks, some with places of their own."""

    def write(**trainer) -> list[str]:
        callbacks = [*CONFIG["trainer"]["callbacks"], *OWN_PLACES]
        flags = {"callbacks": callbacks, "enable_checkpointing": True}
        own = {"trainer": CONFIG["trainer"] | flags | trainer}
        (workplace / "full.yaml").write_text(yaml.safe_dump(CONFIG | own))
        buffer = ["--data.buffer", "ReplayBuffer", "--data.buffer.path", "kept/buffer.sqlite"]
        return [
            "fit",
            "--config",
            "full.yaml",
            *buffer,
            "--model.update.use_rollout_logprobs",
            "true",
        ]

    (workplace / "kept").mkdir()
    (workplace / "kept/iteration_1.ckpt").write_text("an earlier run's")
    return write


def test_a_fast_dev_run_writes_nothing(configuration, workplace, caplog):
    for logger in (False, "CSVLogger"):
        logger = logger and {"class_path": logger, "init_args": {"save_dir": "runs"}}
        command = configuration(fast_dev_run=True, logger=logger)
        before = files(workplace)
        assert main(command) == 0
        assert files(workplace) == before
    assert caplog.text.count("fast_dev_run keeps nothing") == 2  # once in each


def test_rollouts_of_a_fast_dev_run_are_not_kept(workplace, capsys):
    Path("some.jsonl").write_text("of another run")
    before = files(workplace)
    command = ["rollout", "--config", "good.yaml", "--output", "some.jsonl", "--iterations", "3"]
    assert main([*command, "--trainer.fast_dev_run", "true"]) == 0
    assert files(workplace) == before
    assert "8 rollouts written to /" in capsys.readouterr().out


def test_weights_of_a_fast_dev_run_are_not_kept(tmp_path):
    transport = CheckpointTransport(str(tmp_path))
    transport.use_scratch(True)
    assert transport.directory.parent == tmp_path
    transport.use_scratch(False)
    assert transport.directory == tmp_path


@pytest.mark.slow
def test_without_a_logger_each_run_has_a_directory(configuration, workplace):
    command = configuration(logger=False, default_root_dir="root")
    command += ["--trainer.callbacks.dirpath", "null"]  # of the last one, IterationCheckpoint
    before = set(workplace.iterdir())
    assert main(command) == 0
    assert main(command) == 0
    assert set(workplace.iterdir()) == {*before, workplace / "root"}
    runs = workplace / "root/lightning_rl_runs"
    for name in ("version_0", "version_1"):
        there = {path.name for path in (runs / name).iterdir()}
        assert {"config.yaml", "summary.json", "metrics.jsonl", "rollouts.jsonl"} < there
        assert (runs / name / "checkpoints/iteration_1.ckpt").exists()
    # Going on takes the newest, and begins no other.
    assert main([*command, "--ckpt_path", "last", "--trainer.max_epochs", "2"]) == 0
    assert [path.name for path in sorted(runs.iterdir())] == ["version_0", "version_1"]
    assert (runs / "version_1/checkpoints/iteration_2.ckpt").exists()
    assert not (runs / "version_0/checkpoints/iteration_2.ckpt").exists()
