"""Faster starts of vLLM on GPUs: fewer CUDA graphs, and reuse of earlier runs' compiled code."""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_rl.run.files.folders import cache_folder

_log = logging.getLogger(__name__)

_GRAPHS = {
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "enforce_eager",
    "optimization_level",
    "performance_mode",
    "speculative_config",
}
"""Options that determine CUDA graphs; if one of them is set, vLLM decides."""


def graphs(max_num_seqs: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return further arguments of ``vllm.EngineArgs``; {} if ``options`` already set them."""
    if options.keys() & _GRAPHS:
        return {}
    return {"compilation_config": {"cudagraph_capture_sizes": captured_sizes(max_num_seqs)}}


def captured_sizes(max_num_seqs: int) -> list[int]:
    """Return the token counts for which vLLM captures CUDA graphs; steps of other sizes use the
    next.

    The sizes reach as far as vLLM's own, to twice ``max_num_seqs`` or 512, but grow by up to a
    quarter, where vLLM's are 8 or 16 apart: 23 instead of 51 for 256 requests. Each is captured
    once for steps that begin a prompt and, up to ``max_num_seqs``, once for the others, before the
    first token.
    """
    largest = min(2 * max_num_seqs, 512)
    sizes, size = {1, 2, 4, max_num_seqs, largest}, 8
    while size <= largest:
        sizes.add(size)
        size += max(8, 1 << size.bit_length() - 3)
    return sorted(size for size in sizes if size <= largest)


def lasting(model_dir: Path) -> Path:
    """Return a directory with the same files, in the user's cache, whose path is equal in every
    run.

    vLLM stores compiled code under a key that contains the model's path. A run gives it
    configuration and tokenizer in a directory with a new name, so each run would compile again. A
    directory with weights belongs to the user and is used unchanged; so is any if the cache cannot
    be written.
    """
    if any(file.suffix in (".safetensors", ".bin") for file in model_dir.rglob("*")):
        return model_dir
    name = _digest(model_dir)
    place = cache_folder() / "engines" / name
    try:
        if place.exists() and _digest(place) != name:
            shutil.rmtree(place)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=place.parent) as made:
                shutil.copytree(model_dir, Path(made, name)).rename(place)
    except OSError as error:
        if not place.exists():  # else another run made it meanwhile
            _log.warning("later runs cannot reuse vLLM's compiled code: %s", error)
            return model_dir
    return place


def _digest(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's files."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    contents = [(str(f.relative_to(folder)), hashlib.sha256(f.read_bytes())) for f in files]
    whole = "\n".join(f"{content.hexdigest()} {name}" for name, content in contents)
    return hashlib.sha256(whole.encode()).hexdigest()[:20]
