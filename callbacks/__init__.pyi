"""Callbacks, guards and their actions, each from its module."""

from lightning_rl.callbacks.artifacts import (
    RunArtifacts as RunArtifacts,
)
from lightning_rl.callbacks.base import (
    RLCallback as RLCallback,
)
from lightning_rl.callbacks.checkpoint import (
    IterationCheckpoint as IterationCheckpoint,
)
from lightning_rl.callbacks.defaults import (
    ParameterSummary as ParameterSummary,
)
from lightning_rl.callbacks.evaluate import (
    Evaluate as Evaluate,
)
from lightning_rl.callbacks.evaluate_rollouts import (
    EvaluateRollouts as EvaluateRollouts,
)
from lightning_rl.callbacks.export import (
    HFExport as HFExport,
    latest_hf_checkpoint as latest_hf_checkpoint,
)
from lightning_rl.callbacks.guards import (
    BatchGuard as BatchGuard,
    Correct as Correct,
    Finding as Finding,
    Guard as Guard,
    GuardAction as GuardAction,
    IterationGuard as IterationGuard,
    Mask as Mask,
    MetricFloorGuard as MetricFloorGuard,
    MetricGuard as MetricGuard,
    SkipUpdate as SkipUpdate,
    StopRun as StopRun,
    Warn as Warn,
)
from lightning_rl.callbacks.learning_alarms import (
    LearningAlarms as LearningAlarms,
)
from lightning_rl.callbacks.preview import (
    PreviewTable as PreviewTable,
)
from lightning_rl.callbacks.progress import (
    RLProgressBar as RLProgressBar,
    StepTimer as StepTimer,
)
from lightning_rl.callbacks.recorder import (
    RolloutRecorder as RolloutRecorder,
)
from lightning_rl.callbacks.report import (
    RunReport as RunReport,
)
from lightning_rl.callbacks.rerun_recorder import (
    RerunRecorder as RerunRecorder,
)
from lightning_rl.callbacks.rules import (
    DeadExpertGuard as DeadExpertGuard,
    DuplicatesGuard as DuplicatesGuard,
    EffectiveSampleGuard as EffectiveSampleGuard,
    EntropyGuard as EntropyGuard,
    ExpertOverloadGuard as ExpertOverloadGuard,
    KLGuard as KLGuard,
    LengthGuard as LengthGuard,
    LogprobGapGuard as LogprobGapGuard,
    LogprobSpikeGuard as LogprobSpikeGuard,
    NonFiniteGuard as NonFiniteGuard,
    StalenessGuard as StalenessGuard,
    ZeroAdvantageGuard as ZeroAdvantageGuard,
)
from lightning_rl.callbacks.watchdog import (
    Watchdog as Watchdog,
)
from lightning_rl.callbacks.weight_sync import (
    WeightSync as WeightSync,
)
