"""Provide a Slurm of two emulated nodes on the loopback interface, of build/slurm or of PATH.

Jobs in the partition ``low`` make way for those in ``high``: they get their own signal, and have a
minute until they are ended.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_rl.engines.replicas.server_process import free_port

NODES = ("n1", "n2")
UNPACKED = Path(__file__).parents[2] / "build" / "slurm" / "usr"
PATH = os.pathsep.join([str(UNPACKED / "bin"), str(UNPACKED / "sbin"), os.environ["PATH"]])


def program(name: str) -> Path | None:
    """Return a program of Slurm's, also under the name that Debian gives it."""
    found = shutil.which(name, path=PATH) or shutil.which(f"{name}-wlm", path=PATH)
    return None if found is None else Path(found).resolve()


def missing() -> str | None:
    """Return what is not installed, as a reason to skip; None if all is there."""
    names = [n for n in ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun") if not program(n)]
    if names:
        return f"Slurm is not installed ({', '.join(names)} not found): make launch-tools"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    return None


@contextmanager
def cluster(folder: Path, cpus: int = 1) -> Iterator[dict[str, str]]:
    """Start it; gives the environment in which ``sbatch`` and ``srun`` find it."""
    controller, daemon, step = (program(n) for n in ("slurmctld", "slurmd", "slurmstepd"))
    assert controller is not None
    plugins = next((controller.parents[1] / "lib").glob("*/slurm-wlm"), None)
    host = socket.gethostname().partition(".")[0]
    ports = [free_port() for _ in range(3)]
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    settings: dict[str, object] = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "AuthType": "auth/none",  # nothing but this machine reaches it
        "CredType": "cred/none",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool.%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",
    }
    if plugins is not None:
        settings["PluginDir"] = plugins
    (folder / "state").mkdir(parents=True)
    for node in NODES:
        (folder / f"spool.{node}").mkdir()
    partitions = [
        "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60",
        "PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF",
    ]
    lines = [*(f"{key}={value}" for key, value in settings.items()), *nodes, *partitions]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    libraries = [] if plugins is None else [str(plugins), str(plugins.parent)]
    environment = os.environ | {
        "PATH": PATH,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
    }
    commands = [[controller, "-D"], *([daemon, "-D", "-N", node, "-d", step] for node in NODES)]
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            output = stack.enter_context((folder / f"said_{number}").open("w"))
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            stack.callback(_end, process)
        _wait_until_idle(environment)
        yield environment


def _wait_until_idle(environment: dict[str, str]) -> None:
    end = time.monotonic() + 60
    states: list[str] = []
    while states != ["idle"] * len(NODES):
        assert time.monotonic() < end, f"nodes are {states}"
        time.sleep(0.5)
        command = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%t"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        states = done.stdout.split()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
