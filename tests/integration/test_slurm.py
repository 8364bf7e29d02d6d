"""A real Slurm of two nodes on this machine, where there is one: ``sbatch``, ``srun``, requeue."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import slurm_cluster
from tests.support.signalled import configure
from tests.support.two_ranks import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=slurm_cluster.missing() or "it is installed"
    ),
]
ROOT = Path(__file__).parents[2]

JOB = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=said.txt
export MASTER_ADDR=127.0.0.1 MASTER_PORT={{port}} PYTHONPATH={ROOT}
echo "start $SLURM_RESTART_COUNT"
srun {sys.executable} -m lightning_rl fit --config run.yaml \\
  --trainer.devices 1 --trainer.num_nodes 2 --ckpt_path last
echo "status $?"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def call(slurm: dict[str, str], folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(slurm: dict[str, str], folder: Path) -> str:
    (folder / "job.sh").write_text(JOB.format(port=free_port()))
    return call(slurm, folder, "sbatch", "--parsable", "job.sh").strip()


def wait_until(slurm: dict[str, str], folder: Path, said: str) -> str:
    """What the job printed, once it holds the words; a job that waits to start again does not."""
    end = time.monotonic() + 150
    output = folder / "said.txt"
    while True:
        text = output.read_text() if output.exists() else ""
        if said in text:
            return text
        assert time.monotonic() < end, text
        time.sleep(1)


@pytest.mark.parametrize(
    "at", [("1 learn 2 SIGUSR1",), ("0 collect 2 SIGUSR1", "1 learn 2 SIGUSR1")]
)
def test_a_job_is_saved_requeued_and_goes_on(slurm, tiny_model, tmp_path, at):
    folder = configure(tmp_path / "job", tiny_model, *at)
    job = submit(slurm, folder)
    text = wait_until(slurm, folder, f"job {job} is back in the queue")
    # Slurm lets such a job wait for two minutes.
    end = time.monotonic() + 60
    while "PENDING" not in call(slurm, folder, "squeue", "-h", "-j", job, "-o", "%T"):
        assert time.monotonic() < end
        time.sleep(0.5)
    call(slurm, folder, "scontrol", "update", f"JobId={job}", "StartTime=now")
    text = wait_until(slurm, folder, "status 0")
    assert text.count("SIGUSR1; saved runs/one/version_0/checkpoints/iteration_2.ckpt") >= 1
    assert "start 1" in text
    assert text.count("is back in the queue") == 1
    assert "Traceback" not in text
    saved = folder / "runs" / "one" / "version_0" / "checkpoints"
    assert os.readlink(saved / "last.ckpt") == "iteration_4.ckpt"
    assert not list(folder.rglob("hpc_ckpt*"))


def test_scancel_signals_all_tasks_while_a_run_starts(slurm, tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model)
    job = submit(slurm, folder)
    wait_until(slurm, folder, "start")
    end = time.monotonic() + 60
    while f"{job}.0" not in call(slurm, folder, "squeue", "-h", "-s", "-o", "%i"):
        assert time.monotonic() < end
        time.sleep(0.1)
    wait_until(slurm, folder, "Seed set to 0")  # the command listens
    call(slurm, folder, "scancel", "--signal=USR1", f"{job}.0")
    text = wait_until(slurm, folder, "status 138")
    assert text.count("SIGUSR1 came while the run was starting") == 2  # each task
    assert "Traceback" not in text
