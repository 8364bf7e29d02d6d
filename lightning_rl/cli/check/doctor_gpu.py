"""The doctor's checks of GPUs, of compilers for them, and of the rewards' sandbox."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.sandbox import sandboxed
from lightning_rl.run.processes.machine import GPU


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; ``problem`` is None if all is well, else ``fix`` is the remedy."""

    name: str
    value: str
    problem: str | None = None
    fix: str | None = None
    serious: bool = False


MIN_FREE = 0.5
"""The share of a GPU's memory that must be free: less means that other processes use it."""


def check_gpus(gpus: Sequence[GPU], torch_sees: int, torch_cuda: str | None) -> Check:
    """Check that torch can use the driver's GPUs. ``torch_cuda`` is torch's CUDA version."""
    value = f"{'; '.join(map(str, gpus))} (torch sees {torch_sees})" if gpus else "none"
    if len(gpus) <= torch_sees or os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return _check_memory(gpus, value)
    if torch_cuda is None:
        problem, fix = "torch is a CPU build and cannot use them", "make setup (it picks CUDA)"
    else:
        problem = f"torch, built for CUDA {torch_cuda}, sees {torch_sees} of {len(gpus)}"
        fix = "update the NVIDIA driver, or install a torch built for the driver's CUDA"
    return Check("gpu", value, problem, fix, serious=True)


def _check_memory(gpus: Sequence[GPU], value: str) -> Check:
    for number, gpu in enumerate(gpus):
        if gpu.free_mib is None or gpu.total_mib is None:
            continue
        if gpu.free_mib < MIN_FREE * gpu.total_mib:
            used = gpu.total_mib - gpu.free_mib
            problem = f"other processes hold {used} MiB of GPU {number}"
            return Check(
                "gpu", value, problem, "end them (nvidia-smi lists them), or use another GPU"
            )
    return Check("gpu", value)


def check_driver(gpus: Sequence[GPU]) -> Check:
    """Report the NVIDIA driver's version."""
    return Check("driver", ", ".join(sorted({gpu.driver for gpu in gpus})) or "none")


def check_nvcc(version: str | None, torch_cuda: str | None) -> Check:
    """Check that a CUDA compiler, if installed, has torch's CUDA version."""
    if version is None:
        return Check("nvcc", "none (only kernels that are compiled when first used need it)")
    if torch_cuda is None or version.split(".")[0] == torch_cuda.split(".")[0]:
        return Check("nvcc", f"CUDA {version}")
    problem = f"compiles for CUDA {version}, but torch is built for {torch_cuda}"
    return Check("nvcc", f"CUDA {version}", problem, f"set CUDA_HOME to a CUDA {torch_cuda}")


def check_triton(compiler: str | None, header: Path, there: bool, on_cuda: bool) -> Check:
    """Check for a C compiler and ``Python.h``, with which Triton compiles its launchers.

    On GPUs, both vLLM and ``compile: true`` use Triton; on CPUs only ``compile: true`` needs a
    compiler, for C++.
    """
    value = f"{compiler or 'no C compiler'}, {header if there else 'no Python.h'}"
    if compiler and there:
        return Check("compiler", value)
    if not on_cuda:
        return Check("compiler", f"{value} (needed for compile: true)")
    missing = " and ".join(
        [*([] if compiler else ["a C compiler"]), *([] if there else [str(header)])]
    )
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"apt-get install gcc {python}-dev, or a Python that brings its headers"
    problem = f"Triton needs {missing}: vLLM and compile: true fail without"
    return Check("compiler", value, problem, fix, serious=True)


def check_sandbox() -> Check:
    """Check that programs of a model can be tested in a sandbox."""
    try:
        sandboxed([])
    except ConfigError as error:
        return Check("sandbox", "not possible", "PythonTests cannot run here", str(error))
    return Check("sandbox", "works (for PythonTests)")
