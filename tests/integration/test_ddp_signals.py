"""Signals to processes of one run (gloo), as under srun: all stop at one place, or none starts.

With a real Slurm: tests/integration/test_slurm.py.
"""

import os
import re
import socket
from pathlib import Path

import pytest

from benchmarks import forked
from lightning_rl.engines.server_process import free_port
from tests.support.signalled import configure

pytestmark = pytest.mark.timeout(200)  # a deadlock is a failure

SCONTROL = """#!/bin/sh
echo "$@" >> "$REQUEUED"
"""


def job_of(rank: int, port: int, folder: Path) -> dict[str, str]:
    """What srun tells each of two processes on one node; ``scontrol`` notes what it is asked."""
    return os.environ | {
        "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "fit", "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PATH": f"{folder}:{os.environ['PATH']}", "REQUEUED": str(folder / "requeued"),
    }  # fmt: skip


def run(folder: Path, *options: str) -> tuple[list[int], list[str]]:
    """Statuses and outputs of the two processes of ``lightning-rl fit``."""
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    port = free_port()
    processes = [
        forked.started(
            "lightning_rl",
            ["fit", "--config", "run.yaml", *options],
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


def saved(folder: Path) -> list[str]:
    directory = folder / "runs" / "one" / "version_0" / "checkpoints"
    return sorted(path.name for path in directory.glob("iteration_*.ckpt"))


LAST = ("--ckpt_path", "last")


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("0 collect 2 SIGUSR1",), marks=pytest.mark.slow),
        pytest.param(("1 learn 2 SIGUSR1",), marks=pytest.mark.slow),
        ("0 collect 2 SIGUSR1", "1 learn 2 SIGUSR1"),
        pytest.param(
            ("0 learn 2 SIGUSR1", "1 collect 2 SIGUSR1", "1 learn 2 SIGTERM"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_job_whose_time_is_nearly_over_is_saved_once_and_requeued_once(tiny_model, tmp_path, at):
    folder = configure(tmp_path / "job", tiny_model, *at)
    statuses, said = run(folder, *LAST)
    assert statuses == [138, 138], "\n".join(said)
    assert saved(folder) == ["iteration_2.ckpt"]
    for output in said:
        assert "SIGUSR1" in output
        assert output.count("lightning-rl: run interrupted: SIGUSR1") == 1
        assert "Traceback" not in output
    assert (folder / "requeued").read_text() == "requeue 17\n"
    assert not list(folder.rglob("hpc_ckpt*"))  # Lightning's own
    if at == ("1 learn 2 SIGUSR1",):  # one of them is enough to see it go on
        assert "SIGUSR1 to rank 1; saved" in said[0]
        statuses, said = run(folder, *LAST)
        assert statuses == [0, 0], "\n".join(said)
        assert saved(folder)[-1] == "iteration_4.ckpt"


@pytest.mark.slow
def test_a_job_that_would_begin_anew_is_not_requeued(tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model, "1 learn 1 SIGUSR1")
    statuses, said = run(folder)
    assert statuses == [138, 138], "\n".join(said)
    assert saved(folder) == ["iteration_1.ckpt"]
    assert "job 17 is not put back into the queue: without --ckpt_path last" in said[0]
    assert "is not put back" not in said[1]
    assert not (folder / "requeued").exists()


@pytest.mark.slow
def test_a_job_that_is_cancelled_is_saved_and_not_requeued(tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model, "0 collect 2 SIGTERM", "1 collect 2 SIGTERM")
    statuses, said = run(folder, *LAST)
    assert statuses == [143, 143], "\n".join(said)
    assert saved(folder) == ["iteration_2.ckpt"]
    assert not (folder / "requeued").exists()


@pytest.mark.parametrize(
    "at",
    [("0 setup 0 SIGUSR1",), ("1 setup 0 SIGTERM",), ("0 setup 0 SIGUSR1", "1 setup 0 SIGUSR1")],
)
def test_a_signal_while_a_run_starts_is_one_message(tiny_model, tmp_path, at):
    folder = configure(tmp_path / "job", tiny_model, *at)
    statuses, said = run(folder, *LAST)
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


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_is_killed_is_named_with_its_node(tiny_model, tmp_path, killed):
    folder = configure(tmp_path / "job", tiny_model, f"{killed} learn 2 SIGKILL")
    statuses, said = run(folder, *LAST)
    left = 1 - killed
    assert (statuses[killed], statuses[left]) == (-9, 1), "\n".join(said)
    messages = [line for line in said[left].splitlines() if line.startswith("lightning-rl: ")]
    assert len(messages) == 1
    node = re.escape(socket.gethostname())
    assert re.match(
        rf"lightning-rl: peer lost error: rank {killed} \(node {node}\) is gone: ", messages[0]
    )
    assert messages[0].endswith("give the same command with --ckpt_path last")
    assert "Traceback" not in said[left]
