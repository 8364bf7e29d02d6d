"""Test which of the runs in a folder goes on."""

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.run.files.newest_run import continue_newest_run


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Return the folder that a Slurm job of this number writes to."""

    def run(job: int, **options) -> str:
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        trainer = Trainer(
            accelerator="cpu", devices=1, default_root_dir=tmp_path, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        continue_newest_run(trainer)
        return Path(trainer.logger.log_dir).name

    return run


def begun(runs: Path, version: int) -> None:
    checkpoints = runs / f"version_{version}" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "iteration_1.ckpt").touch()


def test_a_job_that_is_submitted_again_goes_on_under_another_number(submit, tmp_path):
    assert submit(111) == "version_111"  # nothing to go on from
    begun(tmp_path / "lightning_logs", 111)
    assert submit(111) == "version_111"  # put back into the queue by Slurm
    assert submit(222) == "version_111"


def test_a_version_of_ones_own_stays(submit, tmp_path):
    begun(tmp_path / "one", 3)
    assert submit(222, logger=CSVLogger(tmp_path, "one", version=7)) == "version_7"
    assert submit(222, logger=CSVLogger(tmp_path, "one")) == "version_3"
