"""The library's errors: each message names the value, the bound it broke and the fix."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LightningRLError(Exception):
    """Root of every error raised on purpose by lightning_rl."""

    def described(self) -> tuple[Any, ...]:
        """Return the arguments to rebuild the error elsewhere; the first is the message."""
        return (str(self),)


class ConfigError(LightningRLError, ValueError):
    """A setting is impossible or contradicts another one."""


class ImportNameError(ConfigError, ImportError):
    """A module is imported under a wrong name; names the right one."""


class DataError(LightningRLError, ValueError):
    """A prompt or rollout file is malformed; names file and line."""


class PictureError(DataError):
    """A picture is unavailable, undecodable or out of bounds; it costs a prompt, not the run."""


class RewardError(LightningRLError):
    """Too large a share of rollouts failed; ``rollouts`` holds them."""

    def __init__(self, message: str, rollouts: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.rollouts = list(rollouts)
        self.file: Path | None = None
        """Where ``RunReport`` has written them; None if it has not."""

    def __str__(self) -> str:
        kept = f"; all {len(self.rollouts)} rollouts are in {self.file}" if self.file else ""
        return super().__str__() + kept


class AgentError(RewardError):
    """Too large a share of rollouts failed because their agent raised."""


class EpisodeError(LightningRLError):
    """A model call is impossible; it costs a rollout at most, not the run."""


class ContextLengthError(EpisodeError):
    """A call's prompt leaves no room in the engine's context."""


class FineTuneError(LightningRLError):
    """A fine-tuning job failed or was cancelled, and no other job replaces it."""


class FilterError(LightningRLError):
    """Group filters reject so many groups that no batch can be filled."""


class EngineError(LightningRLError):
    """The generation engine is missing, broken or not ready."""


class ServerRefusal(EngineError):
    """A server refused; ``status`` is HTTP's, or 0 if the answer was not a vLLM server's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def described(self) -> tuple[Any, ...]:
        return (str(self), self.status)


class ReplicaError(EngineError):
    """An engine process does not start or answer, and no other process replaces it."""


class CheckpointError(LightningRLError):
    """A checkpoint could not be written, or is damaged."""


class NonFiniteWeightsError(CheckpointError):
    """The trainer's weights contain NaN or infinity; they are neither saved nor synced."""


class DiskError(LightningRLError):
    """A file of a run could not be written; its previous version is intact."""


class HubError(LightningRLError):
    """A model could not be pushed to the hub; its export is still on disk."""


class RunInterrupted(LightningRLError):
    """A signal or a deadline stopped the run; ``status`` is its exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.checkpoint: str | None = None
        """The file to resume from; empty if there is none, None before saving was attempted."""

    def described(self) -> tuple[Any, ...]:
        return (self.reason, self.status)

    def __str__(self) -> str:
        if self.checkpoint is None:
            return self.reason
        if not self.checkpoint:
            return f"{self.reason}; nothing was saved"
        return f"{self.reason}; saved {self.checkpoint}; resume with --ckpt_path last"


class GuardError(RunInterrupted):
    """A guard stopped the run; ``reason`` names the value, its bound and possible fixes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=1)

    def described(self) -> tuple[Any, ...]:
        return (self.reason,)

    def __str__(self) -> str:
        if not self.checkpoint:
            return f"{self.reason}; no checkpoint was saved; add IterationCheckpoint to save one"
        return f"{self.reason}; saved {self.checkpoint}"


class PeerLostError(LightningRLError):
    """Another training process is gone; names its rank and node."""


class MicroBatchMemoryError(LightningRLError):
    """Even the smallest micro-batch does not fit into memory."""


class StalledError(EngineError):
    """No rollout has finished for so long that the run seems to hang."""


class WeightSyncError(EngineError):
    """The engine and the trainer disagree after a weight sync."""


class IncompleteWeightsError(WeightSyncError):
    """A push omitted weights, or sent some that the engine's model does not have."""


class DamagedWeightsError(WeightSyncError):
    """The weights that arrived are not those sent: the file is truncated, or of another version."""


class StaleWeightsError(WeightSyncError):
    """The engine answers with weights other than those pushed, or from a stale cache."""


class WrongWeightsError(WeightSyncError):
    """An engine process holds a tensor that differs from the one sent; names both."""


class SyncTimeoutError(WeightSyncError):
    """A process did not finish its part of a push in time."""


def first_line(error: BaseException) -> str:
    """Return the type and first line of an error, at most 300 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def kind_of_path(path: Path) -> str | None:
    """Return the kind of a path, such as a pipe, whose reading would block or never end.

    Returns None for a file, or if nothing exists there.
    """
    if not os.path.exists(path) or os.path.isfile(path):  # False too for names that cannot be
        return None
    kinds = {"a named pipe": path.is_fifo, "a socket": path.is_socket, "a folder": path.is_dir}
    return next((name for name, holds in kinds.items() if holds()), "a device")


def is_url(path: str | Path) -> bool:
    """Tell URLs, also in the form that ``Path`` gives them, ``file:/x``; a drive has one letter."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def local_path(path: str | Path, key: str) -> Path:
    """Return a path that is written to.

    Raises:
        ConfigError: naming its key, if it is a URL, such as ``s3://bucket/runs``.
    """
    if is_url(path):
        raise ConfigError(
            f"{key}={str(path)!r} is a URL, but a run writes local files; choose a local "
            "directory, and copy it afterwards, or mount the remote one"
        )
    return Path(path)


def require_at_least(bound: float, **values: float | None) -> None:
    """Refuse settings that are below a bound or NaN; None passes.

    Raises:
        ConfigError: names the first such key, its value and the bound.
    """
    for name, value in values.items():
        if value is not None and not value >= bound:
            raise ConfigError(f"{name}={value} must be >= {bound:g}")


def require_finite(**values: float | Sequence[float] | None) -> None:
    """Refuse settings that are infinite or NaN, also inside a list; None passes.

    Raises:
        ConfigError: names the first such key and its value.
    """
    for name, value in values.items():
        numbers = value if isinstance(value, Sequence) else [value]
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ConfigError(f"{name}={value} must be finite, neither infinite nor NaN")
