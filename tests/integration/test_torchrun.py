"""Test ``launch/torchrun/fit.sh`` on two nodes, both on the loopback interface.

Slow: each launch starts two nodes, every one of which imports all and trains.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.engines.replicas.server_process import free_port
from tests.support.ranks_checks import command
from tests.support.signalled import FIT, configure, require_same_end, saved
from tests.support.two_ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = ROOT / "launch" / "torchrun" / "fit.sh"


def two_nodes(folder: Path) -> list[int]:
    """Run the same command on each node, in a folder that both see; return the statuses."""
    port = free_port()
    nodes = []
    for rank in (0, 1):
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank),
        }  # fmt: skip
        command = [SCRIPT, "--config", "run.yaml"]
        with (folder / f"node_{rank}").open("a") as said:
            nodes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
            )
    try:
        return [node.wait(150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("node_*")))


def test_two_nodes_train_as_two_processes_on_one(whole_job, tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model)
    assert two_nodes(folder) == [0, 0], said(folder)
    require_same_end(folder, whole_job)


def test_two_nodes_go_on_after_one_was_stopped_or_killed(whole_job, tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model, "1 learn 3 SIGUSR1", "1 learn 4 SIGKILL")
    assert 0 not in two_nodes(folder), said(folder)
    assert "SIGUSR1; saved runs/one/version_0/checkpoints/iteration_3.ckpt" in said(folder)
    assert 0 not in two_nodes(folder), said(folder)
    assert saved(folder) == ["iteration_3.ckpt"]
    (folder / "run.yaml").write_text((whole_job / "run.yaml").read_text())
    assert two_nodes(folder) == [0, 0], said(folder)
    require_same_end(folder, whole_job)


def test_nodes_that_do_not_share_the_run_directory_are_told(
    together, whole_job, tiny_model, tmp_path
):
    """Node 1 finds no checkpoint, and would begin where node 0 goes on."""
    folders = tuple(configure(tmp_path / f"node_{rank}", tiny_model) for rank in (0, 1))
    shutil.copytree(whole_job / "runs", folders[0] / "runs", symlinks=True)
    for status, _, errors in together(2, command, *FIT, folders=folders):
        assert status == 1, errors
        [message] = [line for line in errors.splitlines() if line.startswith("lightning-rl: ")]
        assert "resumes from iteration_4.ckpt, and rank 1 (node " in message
        assert message.endswith(
            "from none: the run's folder must be on a file system that all nodes see"
        )
        assert "Traceback" not in errors
