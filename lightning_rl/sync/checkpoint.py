"""Weight sync by files, on a file system that trainer and engines share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import DamagedWeightsError, require_at_least
from lightning_rl.run.files.rundir import sync_directory
from lightning_rl.sync.staged import StagedTransport
from lightning_rl.sync.stream import Bucket, WeightPart, Weights

_SUFFIX = ".safetensors"


@configurable
class CheckpointTransport(StagedTransport):
    """Writes safetensors files per version, which the engines load; removes those of old versions.

    A file gets its name only when it is completely on disk. Weights are in the engine's dtype.

    Args:
        directory: folder that trainer and engines reach under this path.
        keep: number of versions to keep; restarted replicas are filled from the newest.
        bucket_mb: MiB per file, and of memory to write it from.
        adapters_only: write a LoRA's base once, and then files with its adapters alone.
        timeout_s: time limit of each step of a push; loading a file is one step.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        directory: str,
        keep: int = 2,
        bucket_mb: float = 4096.0,
        adapters_only: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(timeout_s, True, adapters_only, bucket_mb)
        require_at_least(1, keep=keep)
        self.directory = self._given = Path(directory).absolute()
        self.keep = keep

    def for_policy(self, name: str) -> "CheckpointTransport":
        """Return a transport whose files are in a subfolder with the policy's name."""
        settings = self.bucket_mb, self.adapters_only, self.timeout_s
        return CheckpointTransport(str(self._given / name), self.keep, *settings)

    def use_scratch(self, scratch: bool) -> None:
        self.directory = self._given
        if scratch:  # inside, where engines on other machines can see it too
            inside = self.directory if self.directory.is_dir() else None
            self._scratch = tempfile.TemporaryDirectory(prefix="fast_dev_run_", dir=inside)
            self.directory = Path(self._scratch.name)

    def stage(self, part: WeightPart) -> Bucket:
        self.directory.mkdir(parents=True, exist_ok=True)
        weights, held = dict[str, Tensor](), set[int]()
        for name, weight in part.weights.items():
            moved = weight.detach().to("cpu", part.dtype).contiguous()
            place = moved.untyped_storage().data_ptr()
            # Tied weights come twice, and safetensors refuses to store an alias.
            weights[name] = moved.clone() if place in held else moved
            held.add(place)
        path = self.directory / f"{part.kind}-{part.version:08d}-{part.number:04d}{_SUFFIX}"
        temporary = path.with_suffix(".partial")
        try:
            save_file(weights, temporary, {"format": "pt", "version": str(part.version)})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise DamagedWeightsError(
                f"cannot write version {part.version} to {self.directory}: {error}"
            ) from error
        os.replace(temporary, path)
        sync_directory(self.directory)
        return {"path": str(path), "version": part.version}

    def end_push(self, version: int) -> None:
        """Remove versions beyond ``keep``, and earlier bases, by age.

        Not by number: a run that is resumed from an earlier version writes it again.
        """
        for kind, keep in (("weights", self.keep), ("adapters", self.keep), ("base", 1)):
            files = self.directory.glob(f"{kind}-*{_SUFFIX}")
            versions = dict[str, list[Path]]()
            for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
                number = file.name.split("-")[1]
                versions[number] = [*versions.pop(number, []), file]
            if (newest := versions.pop(f"{version:08d}", None)) is not None:
                versions[f"{version:08d}"] = newest  # even if a clock is behind
            for old in list(versions.values())[: max(len(versions) - keep, 0)]:
                for file in old:
                    file.unlink()

    @staticmethod
    def fetch(bucket: Bucket) -> Weights:
        return read_weights(bucket["path"], bucket["version"])


def read_weights(path: str, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's weights.

    Raises:
        DamagedWeightsError: if the file is missing, truncated, or of another version.
    """
    name = Path(path).name  # vLLM blots out whole paths in what it tells
    try:
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("version")
            if written != str(version):
                raise DamagedWeightsError(f"{name} holds version {written} instead of {version}")
            names = file.keys()
            for weight in names:
                yield weight, file.get_tensor(weight)
    except (SafetensorError, OSError) as error:
        raise DamagedWeightsError(f"{name} cannot be read: {error}") from error
