"""Collect the wheels that a GPU machine without a network needs for ``make gpu-check``.

    python -m benchmarks.gpu.wheels                       for torch 2.11: names and sizes
    python -m benchmarks.gpu.wheels --have freeze.txt     less what that machine has
    python -m benchmarks.gpu.wheels --bring build/wheels  download them, packed in pieces

``freeze.txt`` is what ``python3 -m pip freeze`` prints there; without it, torch, lightning and
transformers are taken to be there with all that they need. Versions are those of
install/cuda-constraints.txt, as far as that torch and its vLLM allow. Needs a network, and uv,
which ``make setup`` installs.
"""

import argparse
import configparser
import os
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "install" / "cuda-constraints.txt"
TORCH, VLLM = "2.11.0", "0.26.0"
"""vLLM's wheel for CUDA is made for one version of torch, this one for that."""
THERE = ("lightning", "transformers")
"""The packages that are there, besides torch."""
FOR_TESTS = ("peft", "pytest", "pytest-timeout")
PIECE_MIB = 64


@dataclass(frozen=True)
class Wheel:
    """A file of the package index."""

    name: str
    version: str
    url: str

    @property
    def file(self) -> str:
        """Return the file's name."""
        return self.url.rpartition("/")[2]


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Return versions by canonical name, of lines that name one (``pip freeze`` has others)."""
    found: dict[str, str] = {}
    for line in lines:
        try:
            requirement = Requirement(line.strip())
        except InvalidRequirement:
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==" and "*" not in specifier.version:
                found[canonicalize_name(requirement.name)] = specifier.version.split("+")[0]
    return found


def own_requirements() -> list[str]:
    """Return this library's requirements without an extra."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["install_requires"].split("\n")[1:]


def tags_of(python: str, glibc: int) -> list[Tag]:
    """List the tags that a CPython takes on 64-bit Linux with glibc 2.``glibc``, the best first."""
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(glibc, 4, -1):
        platforms.append(f"manylinux_2_{minor}_x86_64")
        if minor in legacy:
            platforms.append(f"{legacy[minor]}_x86_64")
    platforms.append("linux_x86_64")
    major, _, minor_text = python.partition(".")
    version = (int(major), int(minor_text))
    interpreter = f"cp{major}{minor_text}"
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter, platforms),
    ]


def best_url(urls: Sequence[str], tags: Sequence[Tag]) -> str | None:
    """Return the wheel that pip would take; None: there is none for these tags."""
    rank = {tag: place for place, tag in enumerate(tags)}

    def place(url: str) -> int:
        return min(rank.get(t, len(rank)) for t in parse_wheel_filename(url.rpartition("/")[2])[3])

    best = min(urls, key=place, default=None)
    return best if best is not None and place(best) < len(rank) else None


def resolve(
    requirements: Sequence[str], preferred: Mapping[str, str], python: str, glibc: int
) -> list[Wheel]:
    """Resolve all that ``requirements`` need, at preferred versions where those fit together."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "in.txt").write_text("\n".join(requirements))
        # uv keeps the versions that its output file has, as far as it can.
        chosen = folder / "chosen.txt"
        chosen.write_text("".join(f"{name}=={v}\n" for name, v in preferred.items()))
        locked = folder / "pylock.toml"
        common = [
            *(sys.executable, "-m", "uv", "pip", "compile", str(folder / "in.txt"), "--quiet"),
            *("--python-version", python, "--python-platform", f"x86_64-manylinux_2_{glibc}"),
            *("--only-binary", ":all:", "--no-annotate", "--no-header"),
        ]
        # A folder of wheels may hold the CPU build of torch.
        environment = os.environ | {"UV_FIND_LINKS": ""}
        for more in (
            ["--output-file", str(chosen)],
            ["--constraint", str(chosen), "--format", "pylock.toml", "--output-file", str(locked)],
        ):
            subprocess.run([*common, *more], check=True, env=environment, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(locked.read_text())["packages"]
    tags = tags_of(python, glibc)
    wheels = []
    for package in packages:
        url = best_url([wheel["url"] for wheel in package.get("wheels", ())], tags)
        if url is None:
            raise SystemExit(f"{package['name']} {package['version']} has no wheel for {python}")
        wheels.append(Wheel(canonicalize_name(package["name"]), package["version"], url))
    return wheels


def size_of(wheel: Wheel) -> int:
    """Return a wheel's size in bytes, as the index says."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    request = urllib.request.Request(wheel.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return int(answer.headers["Content-Length"])


def bring(wheels: Sequence[Wheel], python: str, tags: Sequence[Tag], out: Path, mib: int) -> int:
    """Download wheels and pack them into ``out/wheels.tar.00``, ...; returns how many pieces."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("wheels.tar.*"):
        old.unlink()
    platforms = dict.fromkeys(tag.platform for tag in tags if tag.platform != "any")
    with tempfile.TemporaryDirectory(dir=out) as directory:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory),
            *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
            *(f"--platform={platform}" for platform in platforms),
            *(f"{wheel.name}=={wheel.version}" for wheel in wheels),
        ]
        subprocess.run(command, check=True, env=os.environ | {"PIP_FIND_LINKS": ""})
        pack = f'tar -C "$0" -cf - . | split -b {mib}M -d - "$1"/wheels.tar.'
        subprocess.run(["bash", "-ceo", "pipefail", pack, directory, str(out)], check=True)
    return len(list(out.glob("wheels.tar.*")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--have", type=Path, help="pip freeze of that machine")
    parser.add_argument("--python", default="3.12", help="its Python")
    parser.add_argument("--glibc", type=int, default=35, help="the N of its glibc 2.N")
    parser.add_argument("--torch", default=TORCH, help="its torch")
    parser.add_argument("--vllm", default=VLLM, help="made for that torch; empty: none")
    parser.add_argument("--without", nargs="*", default=[], help="names of what can stay behind")
    parser.add_argument("--bring", type=Path, metavar="DIR", help="download them in pieces to here")
    parser.add_argument("--piece-mib", type=int, default=PIECE_MIB)
    options = parser.parse_args()
    torch = f"torch=={options.torch}"
    preferred = pins(CONSTRAINTS.read_text().splitlines())
    if options.have:
        have = pins(options.have.read_text().splitlines())
        preferred |= have
    else:
        there = resolve([torch, *THERE], preferred, options.python, options.glibc)
        have = {wheel.name: wheel.version for wheel in there}
    wanted = [torch, *THERE, *own_requirements(), *FOR_TESTS]
    if options.vllm:
        wanted.append(f"vllm=={options.vllm}")
    found = resolve(wanted, preferred | have, options.python, options.glibc)
    left_out = {canonicalize_name(name) for name in options.without}
    wheels = [w for w in found if have.get(w.name) != w.version and w.name not in left_out]
    with ThreadPoolExecutor(8) as pool:
        sizes = dict(zip(wheels, pool.map(size_of, wheels), strict=True))
    for wheel, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        print(f"{size / 2**20:8.1f} MiB  {wheel.file}")
    total = sum(sizes.values()) / 2**20
    print(f"{total:8.1f} MiB  {len(wheels)} wheels, {total / options.piece_mib:.1f} pieces")
    if options.bring:
        tags = tags_of(options.python, options.glibc)
        count = bring(wheels, options.python, tags, options.bring, options.piece_mib)
        print(f"{count} pieces: {options.bring}/wheels.tar.*; over there, beside the checkout:")
        print("  mkdir wheels && cat wheels.tar.* | tar -x -C wheels")
        print("  python3 -m pip install --no-index --no-deps --target site wheels/*.whl")
        print("  PYTHONPATH=$PWD/site make gpu-check GPU_PYTHON=python3")


if __name__ == "__main__":
    main()
