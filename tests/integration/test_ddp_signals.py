"""Signals to processes of one run (gloo), as under srun: all stop at one place, or none starts.

tests/integration/test_slurm.py has a real Slurm.
"""

import os
import re
import socket
from pathlib import Path

import pytest

from benchmarks.support import forked
from lightning_rl.engines.replicas.server_process import free_port
from tests.support.ranks_checks import command
from tests.support.signalled import FIT, configure, require_same_end, saved

pytestmark = pytest.mark.timeout(200)  # a deadlock is a failure
slow = pytest.mark.slow

SCONTROL = """#!/bin/sh
echo "$@" >> "$REQUEUED"
"""


def job_of(rank: int, port: int, folder: Path) -> dict[str, str]:
    """Return srun's variables for each of two processes of a node; ``scontrol`` notes its calls."""
    return os.environ | {
        "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "fit", "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PATH": f"{folder}:{os.environ['PATH']}", "REQUEUED": str(folder / "requeued"),
    }  # fmt: skip


def run(folder: Path, *words: str) -> tuple[list[int], list[str]]:
    """Return statuses and outputs of the two processes of ``lightning-rl fit``."""
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    port = free_port()
    processes = [
        forked.started(
            "lightning_rl",
            words or FIT,
            folder / f"said_{rank}",
            job_of(rank, port, folder),
            folder,
        )
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            process.join(90)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return statuses, [(folder / f"said_{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("0 collect 2 SIGUSR1",), marks=slow),
        ("1 learn 2 SIGUSR1",),
        pytest.param(("0 collect 2 SIGUSR1", "1 learn 2 SIGUSR1"), marks=slow),
        pytest.param(
            ("0 learn 2 SIGUSR1", "1 collect 2 SIGUSR1", "1 learn 2 SIGTERM"),
            marks=slow,
        ),
    ],
)
def test_a_job_whose_time_is_nearly_over_is_saved_once_and_requeued_once(
    together, whole_job, tiny_model, tmp_path, at
):
    """The job then goes on as if nothing had come."""
    folder = configure(tmp_path / "job", tiny_model, *at)
    statuses, said = run(folder)
    assert statuses == [138, 138], "\n".join(said)
    assert saved(folder) == ["iteration_2.ckpt"]
    for output in said:
        assert "SIGUSR1" in output
        assert output.count("lightning-rl: run interrupted: SIGUSR1") == 1
        assert "Traceback" not in output
    assert (folder / "requeued").read_text() == "requeue 17\n"
    assert not list(folder.rglob("hpc_ckpt*"))  # Lightning's own
    if at == ("1 learn 2 SIGUSR1",):
        assert "SIGUSR1 to rank 1; saved" in said[0]
    require_same_rest(together, folder, whole_job)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_lightning_started_stop_together(
    together, whole_job, tiny_model, tmp_path, rank
):
    folder = configure(tmp_path / "job", tiny_model, f"{rank} learn 2 SIGTERM")
    output = folder / "said"
    assert forked.run("lightning_rl", FIT, output, folder=folder) == 143, output.read_text()
    said = output.read_text()
    assert said.count("lightning-rl: run interrupted: SIGTERM") == 2, said
    assert saved(folder) == ["iteration_2.ckpt"]
    require_same_rest(together, folder, whole_job)


def require_same_rest(together, folder, whole_job):
    """Require that the job goes on with its configuration, and ends as if never interrupted."""
    (folder / "run.yaml").write_text((whole_job / "run.yaml").read_text())
    for status, _, errors in together(2, command, *FIT, folders=(folder,)):
        assert status == 0, errors
    require_same_end(folder, whole_job)


@slow
def test_a_job_that_would_begin_anew_is_not_requeued(tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model, "1 learn 1 SIGUSR1")
    statuses, said = run(folder, *FIT[:3])
    assert statuses == [138, 138], "\n".join(said)
    assert saved(folder) == ["iteration_1.ckpt"]
    assert "job 17 is not requeued: without --ckpt_path last" in said[0]
    assert "is not requeued" not in said[1]
    assert not (folder / "requeued").exists()


@slow
def test_a_job_that_is_cancelled_is_saved_and_not_requeued(tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model, "0 collect 2 SIGTERM", "1 collect 2 SIGTERM")
    statuses, said = run(folder)
    assert statuses == [143, 143], "\n".join(said)
    assert saved(folder) == ["iteration_2.ckpt"]
    assert not (folder / "requeued").exists()


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("0 setup 0 SIGUSR1",), marks=slow),
        ("1 setup 0 SIGTERM",),
        pytest.param(("0 setup 0 SIGUSR1", "1 setup 0 SIGUSR1"), marks=slow),
    ],
)
def test_a_signal_while_a_run_starts_is_one_message(tiny_model, tmp_path, at):
    folder = configure(tmp_path / "job", tiny_model, *at)
    statuses, said = run(folder)
    told = {int(plan.split()[0]): plan.split()[3] for plan in at}
    for rank, output in enumerate(said):
        messages = [line for line in output.splitlines() if line.startswith("lightning-rl: ")]
        assert len(messages) == 1, output
        assert "Traceback" not in output
        if rank in told:
            assert f"run interrupted: {told[rank]} came while the run was starting" in messages[0]
            assert statuses[rank] == (138 if told[rank] == "SIGUSR1" else 143)
        else:
            assert statuses[rank] == 1
            assert f"rank {1 - rank}" in messages[0]
            assert "--ckpt_path last" in messages[0]
    assert saved(folder) == []


@pytest.mark.parametrize("killed", [pytest.param(0, marks=slow), 1])
def test_a_process_that_is_killed_is_named_with_its_node(tiny_model, tmp_path, killed):
    folder = configure(tmp_path / "job", tiny_model, f"{killed} learn 2 SIGKILL")
    statuses, said = run(folder)
    left = 1 - killed
    assert (statuses[killed], statuses[left]) == (-9, 1), "\n".join(said)
    messages = [line for line in said[left].splitlines() if line.startswith("lightning-rl: ")]
    assert len(messages) == 1
    node = re.escape(socket.gethostname())
    assert re.match(
        rf"lightning-rl: peer lost error: rank {killed} \(node {node}\) is gone: ", messages[0]
    )
    assert messages[0].endswith("run the same command with --ckpt_path last")
    assert "Traceback" not in said[left]
