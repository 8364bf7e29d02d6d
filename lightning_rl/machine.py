"""Facts about this machine that Python does not tell as they are: the share of cores and memory
that a container leaves us, the processor's name, the GPUs that the driver has."""

import os
import platform
import shutil
import subprocess
from pathlib import Path


def cgroup_limit(*paths: str) -> list[int]:
    """Numbers in the first of these files of /sys/fs/cgroup that exists; empty without a limit."""
    for path in paths:
        file = Path("/sys/fs/cgroup", path)
        if file.exists():
            words = file.read_text().split()
            return [] if "max" in words or "-1" in words else [int(word) for word in words]
    return []


def usable_cores() -> int:
    """Cores this process may use: its affinity, or less where the container has a CPU quota."""
    cores = len(os.sched_getaffinity(0))
    limit = cgroup_limit("cpu.max")
    if not limit:
        quota = cgroup_limit("cpu/cpu.cfs_quota_us")
        limit = quota and quota + cgroup_limit("cpu/cpu.cfs_period_us")
    return min(cores, max(1, limit[0] // limit[1])) if len(limit) == 2 else cores


def memory_bytes() -> int:
    """RAM of the machine, or the container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limit("memory.max", "memory/memory.limit_in_bytes")])


def cpu_model() -> str:
    """The processor's own name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver_gpus() -> list[str]:
    """GPU names by the NVIDIA driver, whatever torch thinks; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ["an NVIDIA driver that did not answer within 20 s"]
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []
