"""``launch/ray``: a cluster of two nodes that asks for a token, and a run as one of its jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from lightning_rl.engines.replicas.server_process import free_port
from tests.support.signalled import configure
from tests.support.two_ranks import ROOT

RAY = ROOT / "build" / "ray" / "bin"
SCRIPTS = ROOT / "launch" / "ray"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(590),
    pytest.mark.skipif(
        not (RAY / "ray").exists(), reason="ray[default] is not installed: make launch-tools"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Start two nodes of one CPU each; yield the environment of a user on the head."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="ray")))  # sockets: a short path
        (place / "token").write_text("5" * 64)
        ports = {"RAY_PORT": str(free_port()), "DASHBOARD_PORT": str(free_port())}
        environment = os.environ | ports | {
            "PATH": f"{RAY}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN_PATH": str(place / "token"),
            "RAY_TMPDIR": str(place),
        }  # fmt: skip
        for arguments in ([], [f"127.0.0.1:{ports['RAY_PORT']}"]):
            agent = f"--dashboard-agent-listen-port {free_port()}"
            node = {"RAY_OPTIONS": f"--block --num-cpus 1 --object-store-memory 100000000 {agent}"}
            start(stack, [SCRIPTS / "start.sh", *arguments], environment | node)
        yield environment


def start(stack: ExitStack, command: list, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    stack.callback(process.wait)
    stack.callback(os.killpg, process.pid, signal.SIGTERM)
    assert any("Ray runtime started" in line for line in process.stdout)


def submit(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [SCRIPTS / "submit.sh", "--config", "run.yaml"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """Make a folder for two iterations by vLLM in two Ray actors."""
    folder = configure(tmp_path / "job", tiny_model, iterations=2)
    configuration = yaml.safe_load((folder / "run.yaml").read_text())
    engine = {"max_model_len": 32, "kv_cache_gb": 0.05, "replicas": 2, "placement": "STRICT_SPREAD"}
    configuration["data"]["init_args"]["engine"] = {"class_path": "RayEngine", "init_args": engine}
    configuration["trainer"]["devices"] = 1
    configuration["trainer"]["callbacks"] += [{"class_path": "RunReport"}]
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration))
    return folder


def test_a_run_is_a_job_of_a_cluster_of_two_nodes(cluster, folder):
    """Strictly spread: without the second node no engine would start."""
    begin = time.monotonic()
    done = submit(folder, cluster)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"after {time.monotonic() - begin:.0f} s: {said}"
    assert "succeeded" in said
    run = folder / "runs" / "one" / "version_0"
    assert os.readlink(run / "checkpoints" / "last.ckpt") == "iteration_2.ckpt"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["sync/probe_gap"] < 1e-3 for row in rows)


def test_a_job_without_the_token_is_refused(cluster, folder, tmp_path):
    (tmp_path / "wrong").write_text("6" * 64)
    done = submit(folder, cluster | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")})
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
    assert not (folder / "runs").exists()
