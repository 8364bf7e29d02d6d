"""``launch/torchrun/fit.sh`` on two nodes, both on the loopback interface."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import forked
from lightning_rl.engines.server_process import free_port
from tests.support.signalled import configure
from tests.support.two_ranks import ROOT, environment_of

pytestmark = pytest.mark.timeout(400)
SCRIPT = ROOT / "launch" / "torchrun" / "fit.sh"


def two_nodes(*folders: Path) -> list[int]:
    """Statuses of the same command on each node, which have these folders; or this one together."""
    port = free_port()
    nodes = []
    for rank in (0, 1):
        folder = folders[rank % len(folders)]
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


def said(*folders: Path) -> str:
    paths = (path for folder in folders for path in sorted(folder.glob("node_*")))
    return "\n".join(path.read_text() for path in paths)


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    path = folder / f"runs/one/version_0/checkpoints/iteration_{iteration}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def one_node(tiny_model, tmp_path_factory) -> Path:
    """What two processes on one machine leave."""
    folder = configure(tmp_path_factory.mktemp("nodes") / "one", tiny_model)
    status = forked.run(
        "lightning_rl", ["fit", "--config", "run.yaml"], folder / "node_0", folder=folder
    )
    assert status == 0, said(folder)
    return folder


def test_two_nodes_train_as_two_processes_on_one(one_node, tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model)
    assert two_nodes(folder) == [0, 0], said(folder)
    require_equal(weights(folder, 4), weights(one_node, 4))


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGUSR1", "SIGKILL"])
def test_two_nodes_go_on_after_one_was_stopped(one_node, tiny_model, tmp_path, signal):
    folder = configure(tmp_path / "job", tiny_model, f"1 learn 3 {signal}")
    path = folder / "run.yaml"
    configuration = yaml.safe_load(path.read_text())
    checkpoints = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 2}}
    configuration["trainer"]["callbacks"].append(checkpoints)
    path.write_text(yaml.safe_dump(configuration))
    statuses = two_nodes(folder)
    assert 0 not in statuses, said(folder)
    if signal == "SIGUSR1":
        assert "SIGUSR1; saved runs/one/version_0/checkpoints/iteration_3.ckpt" in said(folder)
    configuration["trainer"]["callbacks"][0]["init_args"]["at"] = []
    path.write_text(yaml.safe_dump(configuration))
    assert two_nodes(folder) == [0, 0], said(folder)
    require_equal(weights(folder, 4), weights(one_node, 4))


def test_nodes_that_do_not_share_the_run_directory_are_told(one_node, tiny_model, tmp_path):
    """Node 1 finds no checkpoint, and would begin where node 0 goes on."""
    folders = [configure(tmp_path / f"node_{rank}", tiny_model) for rank in (0, 1)]
    shutil.copytree(one_node / "runs", folders[0] / "runs", symlinks=True)
    port = free_port()
    command = ["fit", "--config", "run.yaml", "--ckpt_path", "last"]
    processes = [
        forked.started(
            "lightning_rl",
            command,
            folders[rank] / "node_said",
            environment_of(rank, 2, port),
            folders[rank],
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [1, 1], said(*folders)
    for folder in folders:
        [message] = [
            line for line in said(folder).splitlines() if line.startswith("lightning-rl: ")
        ]
        assert "goes on from iteration_4.ckpt, and rank 1 (node " in message
        assert message.endswith(
            "from none: the run's folder must be on a file system that all nodes see"
        )
        assert "Traceback" not in said(folder)
