"""Callbacks: everything around learning. Each is one class that a YAML line selects."""

from lightning_rl.errors import ImportNameError

# Under another name each class would be there twice, and isinstance fail.
if __name__ != "lightning_rl.callbacks":
    raise ImportNameError(
        f"callbacks/ is the package lightning_rl.callbacks, and was imported as {__name__!r}; "
        "write `from lightning_rl.callbacks import Evaluate`, or lightning_rl.callbacks.evaluate"
    )

from lightning_rl.callbacks.artifacts import RunArtifacts
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.batch_guards import (
    EffectiveSampleGuard,
    LogprobGapGuard,
    LogprobSpikeGuard,
    RewardAlarmGuard,
    StalenessGuard,
    ZeroAdvantageGuard,
)
from lightning_rl.callbacks.checkpoint import IterationCheckpoint
from lightning_rl.callbacks.defaults import ParameterSummary
from lightning_rl.callbacks.evaluate import Evaluate
from lightning_rl.callbacks.export import HFExport
from lightning_rl.callbacks.guards import (
    BatchGuard,
    Correct,
    EntropyGuard,
    Finding,
    Guard,
    GuardAction,
    KLGuard,
    Mask,
    MetricFloorGuard,
    MetricGuard,
    NonFiniteGuard,
    SkipUpdate,
    StopRun,
    Warn,
)
from lightning_rl.callbacks.learning_alarms import LearningAlarms
from lightning_rl.callbacks.preview import PreviewTable
from lightning_rl.callbacks.progress import RLProgressBar, StepTimer
from lightning_rl.callbacks.recorder import RerunRecorder, RolloutRecorder, RolloutWriter
from lightning_rl.callbacks.report import RunReport
from lightning_rl.callbacks.reward_alarms import RewardAlarms
from lightning_rl.callbacks.watchdog import Watchdog
from lightning_rl.callbacks.weight_sync import WeightSync

__all__ = [
    "BatchGuard",
    "Correct",
    "EffectiveSampleGuard",
    "EntropyGuard",
    "Evaluate",
    "Guard",
    "GuardAction",
    "HFExport",
    "IterationCheckpoint",
    "KLGuard",
    "LearningAlarms",
    "LogprobGapGuard",
    "LogprobSpikeGuard",
    "Mask",
    "MetricFloorGuard",
    "MetricGuard",
    "NonFiniteGuard",
    "ParameterSummary",
    "PreviewTable",
    "RLCallback",
    "RLProgressBar",
    "RerunRecorder",
    "RewardAlarmGuard",
    "RewardAlarms",
    "RolloutRecorder",
    "RolloutWriter",
    "RunArtifacts",
    "RunReport",
    "SkipUpdate",
    "StalenessGuard",
    "StepTimer",
    "StopRun",
    "Warn",
    "Watchdog",
    "WeightSync",
    "ZeroAdvantageGuard",
]
