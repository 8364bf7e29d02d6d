"""Test what the doctor says of GPUs, compilers and the sandbox; answers are faked."""

from pathlib import Path

import pytest

from lightning_rl.cli.check import doctor_gpu
from lightning_rl.cli.check.doctor_gpu import Check
from lightning_rl.errors import ConfigError
from lightning_rl.run.processes.machine import (
    GPU,
    c_compiler,
    cuda_compiler,
    driver_gpus,
    python_header,
)

H100 = GPU("NVIDIA H100 80GB HBM3", 80_000, 81_559, "9.0", "580.65.06")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a program on the path, and nothing else, that prints what it is given."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("CC", raising=False)

    def make(name: str, printed: str, status: int = 0) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{printed}\nEND\nexit {status}\n")
        path.chmod(0o755)

    return make


def test_gpus_are_read_from_the_drivers_program(program):
    assert driver_gpus() == []
    program("nvidia-smi", "NVIDIA H100 80GB HBM3, 80000, 81559, 9.0, 580.65.06\n"
            "GRID, [N/A], [N/A], [N/A], 580.65.06")  # fmt: skip
    first, second = driver_gpus()
    assert first == H100
    assert str(first) == ("NVIDIA H100 80GB HBM3, compute capability 9.0, 80000 of 81559 MiB free")
    assert str(second) == "GRID"
    program("nvidia-smi", "NVIDIA-SMI has failed", status=9)
    assert driver_gpus() == []


def test_the_cuda_compilers_version_is_read(program):
    assert cuda_compiler() is None
    program("nvcc", "nvcc: NVIDIA (R) Cuda compiler driver\n"
            "Cuda compilation tools, release 13.0, V13.0.88")  # fmt: skip
    assert cuda_compiler() == "13.0"


def test_the_c_compiler_is_looked_up(program, tmp_path):
    assert c_compiler() is None
    program("clang", "")
    assert c_compiler() == str(tmp_path / "clang")
    assert python_header().name == "Python.h"


def test_a_gpu_that_others_use_is_a_warning():
    taken = GPU("NVIDIA H100", 20_000, 81_559, "9.0", "580.65.06")
    check = doctor_gpu.check_gpus([H100, taken], 2, "13.0")
    assert check.problem == "other processes hold 61559 MiB of GPU 1"
    assert not check.serious
    assert "compute capability 9.0, 20000 of 81559 MiB free" in check.value
    assert doctor_gpu.check_gpus([H100], 1, "13.0").problem is None
    assert doctor_gpu.check_driver([H100, taken]) == Check("driver", "580.65.06")
    assert doctor_gpu.check_driver([]).value == "none"


def test_a_cuda_compiler_of_another_major_version_is_a_warning():
    assert doctor_gpu.check_nvcc("13.1", "13.0").problem is None
    assert doctor_gpu.check_nvcc("12.4", None).problem is None  # torch is a CPU build
    assert doctor_gpu.check_nvcc(None, "13.0").problem is None
    check = doctor_gpu.check_nvcc("12.4", "13.0")
    assert check.problem == "compiles for CUDA 12.4, but torch is built for 13.0"
    assert not check.serious


def test_what_triton_compiles_with_is_serious_on_gpus_only():
    header = Path("/usr/include/python3.11/Python.h")
    good = doctor_gpu.check_triton("/usr/bin/gcc", header, True, on_cuda=True)
    assert good == Check("compiler", f"/usr/bin/gcc, {header}")
    for compiler, there, missing in (
        ("/usr/bin/gcc", False, f"Triton needs {header}:"),
        (None, True, "Triton needs a C compiler:"),
        (None, False, f"Triton needs a C compiler and {header}:"),
    ):
        check = doctor_gpu.check_triton(compiler, header, there, on_cuda=True)
        assert check.serious
        assert check.problem.startswith(missing)
        assert doctor_gpu.check_triton(compiler, header, there, on_cuda=False).problem is None


def test_the_sandbox_is_tried_and_a_refusal_told(monkeypatch):
    monkeypatch.setattr(doctor_gpu, "sandboxed", lambda command: command)
    assert doctor_gpu.check_sandbox().problem is None

    def refuse(command):
        raise ConfigError("there is no bwrap: apt-get install bubblewrap")

    monkeypatch.setattr(doctor_gpu, "sandboxed", refuse)
    told = doctor_gpu.check_sandbox()
    assert (told.problem, told.serious) == ("PythonTests cannot run here", False)
    assert told.fix == "there is no bwrap: apt-get install bubblewrap"
