"""Weights in files, on a file system that trainer and engines share."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine, checked
from lightning_rl.engines.replicated import ReplicatedEngine
from lightning_rl.errors import ConfigError, DamagedWeightsError, require_at_least
from lightning_rl.run.rundir import sync_directory
from lightning_rl.sync.adapters import divide
from lightning_rl.sync.buckets import unit_of
from lightning_rl.sync.remote import RemoteTransport
from lightning_rl.sync.sources import Bucket, read_weights

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SUFFIX = ".safetensors"


@configurable
class CheckpointTransport(RemoteTransport):
    """One safetensors file per version, that the engines load; old ones are removed.

    A file appears under its name only when all of it is on the disk, and is written tensor by
    tensor, cast to the engine's dtype, so no second copy of the weights is in memory.

    Args:
        directory: seen by trainer and engines under this path.
        keep: files to keep: the newest, from which restarted replicas are filled, and those before.
        changed_only: engines load only modules that differ from the file before.
        adapters_only: write a LoRA's base once, and then files with its adapters alone.
        timeout_s: for each step of a push; loading the file is one.

    Raises:
        ConfigError: for impossible values.
    """

    source = "file"

    def __init__(
        self,
        directory: str,
        keep: int = 2,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(timeout_s, changed_only, adapters_only)
        require_at_least(1, keep=keep)
        if changed_only and keep < 2:
            raise ConfigError(f"changed_only=true compares with the file before; {keep=} must be 2")
        self.directory = self._given = Path(directory).absolute()
        self.keep = keep
        self._files: dict[str, Bucket] = {}  # of the last push; adapters before their base

    @property
    def _keeps(self) -> bool:
        return True

    def use_scratch(self, scratch: bool) -> None:
        self.directory = self._given
        if scratch:  # inside, where engines on other machines can see it too
            inside = self.directory if self.directory.is_dir() else None
            self._scratch = tempfile.TemporaryDirectory(prefix="fast_dev_run_", dir=inside)
            self.directory = Path(self._scratch.name)

    def _stage(
        self,
        engine: ReplicatedEngine,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        everything: bool,
    ) -> Iterator[Bucket]:
        dtype = getattr(torch, engine.dtype)
        if not self.adapters_only:
            before = self._newest()
            told = self._write("weights", weights, engine.shapes, dtype, version)
            names = None if everything or before is None else _changed(before, Path(told["path"]))
            if names is None or names:
                yield told | {"names": names}
            return
        adapters, base = divide(weights)
        yield self._write("adapters", adapters.items(), _shapes(adapters), torch.float32, version)
        if base is not None:
            self._write("base", base, engine.shapes, dtype, version)
            self._has_base = True
        if everything:
            yield self._files["base"]

    def _again(self, version: int) -> Iterator[Bucket]:
        yield from self._files.values()

    def _carry_here(
        self, engine: Engine, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> Iterable[tuple[str, Tensor]]:
        items = dict(weights)
        stem, dtype = (
            ("adapters", torch.float32)
            if self.adapters_only
            else ("weights", getattr(torch, engine.dtype))
        )
        told = self._write(stem, items.items(), _shapes(items), dtype, version)
        return read_weights(told["path"], version, None)

    # ---------------------------------------------------------------- files

    def _newest(self) -> Path | None:
        return max(self.directory.glob(f"weights-*{_SUFFIX}"), default=None)

    def _write(
        self,
        stem: str,
        weights: Iterable[tuple[str, Tensor]],
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        version: int,
    ) -> Bucket:
        """Write a version's file, remove those that are too old, and say where it is."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{stem}-{version:08d}{_SUFFIX}"
        temporary = path.with_suffix(".partial")
        try:
            write_safetensors(temporary, checked(weights, shapes), shapes, dtype, version)
        except OSError as error:
            raise DamagedWeightsError(
                f"cannot write version {version} to {self.directory}: {error}"
            ) from error
        os.replace(temporary, path)
        sync_directory(self.directory)
        # By age, not by number: a run that is resumed from an earlier version writes that anew.
        files = sorted(
            self.directory.glob(f"{stem}-*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns
        )
        for old in files[: -1 if stem == "base" else -self.keep]:
            old.unlink()
        self._files[stem] = {"path": str(path), "version": version, "names": None}
        return self._files[stem]


def write_safetensors(
    path: Path,
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    version: int,
) -> None:
    """Write tensor by tensor, in any order, and return when all is on the disk.

    The format: 8 bytes of the header's length, little-endian; the header, JSON; then the data
    (https://huggingface.co/docs/safetensors).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", "version": str(version)}}
    places, end = {}, 0
    for name, shape in shapes.items():
        places[name], begin = end, end
        end += shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # data aligned, for who maps it
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        os.truncate(file.fileno(), data + end)
        for name, weight in weights:
            flat = weight.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
            file.seek(data + places[name])
            view = memoryview(flat.numpy())  # type: ignore[arg-type]
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _changed(before: Path, after: Path) -> list[str]:
    """Weights of all modules in which two files differ."""
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        names = list(new.keys())
        units = {
            unit_of(name)
            for name in names
            if not torch.equal(old.get_tensor(name), new.get_tensor(name))
        }
    return [name for name in names if unit_of(name) in units]
