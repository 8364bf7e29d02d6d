"""Weight sync by files, on a file system that trainer and engines share."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, DamagedWeightsError, require_at_least
from lightning_rl.run.files.rundir import sync_directory
from lightning_rl.sync.adapters import unit_of
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, Kind, Weights, WeightStream

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SUFFIX = ".safetensors"


def read_weights(path: str, version: int, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's weights, or those with ``names``.

    Raises:
        DamagedWeightsError: if the file is missing, truncated, or of another version.
    """
    name = Path(path).name  # vLLM blots out whole paths in what it tells
    try:
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("version")
            if written != str(version):
                raise DamagedWeightsError(f"{name} holds version {written} instead of {version}")
            for weight in list(file.keys()) if names is None else names:
                yield weight, file.get_tensor(weight)
    except (SafetensorError, OSError) as error:
        raise DamagedWeightsError(f"{name} cannot be read: {error}") from error


@configurable
class CheckpointTransport(StagedTransport):
    """Writes one safetensors file per version, which the engines load; removes old files.

    A file gets its name only when it is completely on disk. It is written tensor by tensor, cast to
    the engine's dtype, so there is no second copy of the weights in memory.

    Args:
        directory: folder that trainer and engines reach under this path.
        keep: number of files to keep; restarted replicas are filled from the newest.
        changed_only: engines load only modules that differ from the previous file.
        adapters_only: write a LoRA's base once, and then files with its adapters alone.
        timeout_s: time limit of each step of a push; loading the file is one step.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        directory: str,
        keep: int = 2,
        changed_only: bool = False,
        adapters_only: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(timeout_s, True, changed_only, adapters_only)
        require_at_least(1, keep=keep)
        if changed_only and keep < 2:
            raise ConfigError(
                f"changed_only=true compares with the previous file; {keep=} must be >= 2"
            )
        self.directory = self._given = Path(directory).absolute()
        self.keep = keep

    def for_policy(self, name: str) -> "CheckpointTransport":
        """Return a transport whose files are in a subfolder with the policy's name."""
        settings = self.changed_only, self.adapters_only, self.timeout_s
        return CheckpointTransport(str(self._given / name), self.keep, *settings)

    def use_scratch(self, scratch: bool) -> None:
        self.directory = self._given
        if scratch:  # inside, where engines on other machines can see it too
            inside = self.directory if self.directory.is_dir() else None
            self._scratch = tempfile.TemporaryDirectory(prefix="fast_dev_run_", dir=inside)
            self.directory = Path(self._scratch.name)

    def stage(self, weights: WeightStream) -> Iterator[Bucket]:
        before = next(reversed(self._by_age("weights")), None)
        path = self._write(weights)
        names = None
        # A file that was written over is gone, and cannot be compared with.
        if weights.changed_only and before is not None and before != path:
            names = _changed(before, path)
        yield {"path": str(path), "version": weights.version, "names": names}

    @staticmethod
    def fetch(bucket: Bucket) -> Weights:
        return read_weights(bucket["path"], bucket["version"], bucket["names"])

    def _write(self, weights: WeightStream) -> Path:
        """Write a version's file, and remove files beyond ``keep``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{weights.kind}-{weights.version:08d}{_SUFFIX}"
        temporary = path.with_suffix(".partial")
        try:
            write_safetensors(temporary, weights)
        except OSError as error:
            raise DamagedWeightsError(
                f"cannot write version {weights.version} to {self.directory}: {error}"
            ) from error
        os.replace(temporary, path)
        sync_directory(self.directory)
        earlier = [file for file in self._by_age(weights.kind) if file != path]
        kept = 0 if weights.kind == "base" else self.keep - 1
        for old in earlier[: max(len(earlier) - kept, 0)]:
            old.unlink()
        return path

    def _by_age(self, kind: Kind) -> list[Path]:
        """Return the files of this kind, oldest first.

        By age, not by number: a run that is resumed from an earlier version writes it again.
        """
        files = self.directory.glob(f"{kind}-*{_SUFFIX}")
        return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def write_safetensors(path: Path, weights: WeightStream) -> None:
    """Write weights tensor by tensor, in any order; return when everything is on disk.

    The format is: the header's length in 8 bytes, little-endian; the header as JSON; then the data
    (https://huggingface.co/docs/safetensors).
    """
    version, dtype = str(weights.version), weights.dtype
    header: dict[str, object] = {"__metadata__": {"format": "pt", "version": version}}
    places, end = {}, 0
    for name, shape in weights.shapes.items():
        places[name], begin = end, end
        end += shape.numel() * dtype.itemsize
        offsets = [begin, end]
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
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


def _changed(before: Path, after: Path) -> list[str]:
    """Return the names of the weights in all modules in which two files differ."""
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        names = list(new.keys())
        units = {
            unit_of(name)
            for name in names
            if not torch.equal(old.get_tensor(name), new.get_tensor(name))
        }
    return [name for name in names if unit_of(name) in units]
