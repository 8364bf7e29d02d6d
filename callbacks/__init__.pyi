"""Callbacks, guards and their actions, each from its module."""

from lightning_rl.callbacks.artifacts import (
    RunArtifacts as RunArtifacts,
)
from lightning_rl.callbacks.base import (
    RLCallback as RLCallback,
)
from lightning_rl.callbacks.batch_guards import (
    EffectiveSampleGuard as EffectiveSampleGuard,
    LogprobGapGuard as LogprobGapGuard,
    LogprobSpikeGuard as LogprobSpikeGuard,
    StalenessGuard as StalenessGuard,
    ZeroAdvantageGuard as ZeroAdvantageGuard,
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
from lightning_rl.callbacks.expert_guards import (
    DeadExpertGuard as DeadExpertGuard,
    ExpertOverloadGuard as ExpertOverloadGuard,
)
from lightning_rl.callbacks.export import (
    HFExport as HFExport,
    latest_hf_checkpoint as latest_hf_checkpoint,
)
from lightning_rl.callbacks.guards import (
    BatchGuard as BatchGuard,
    Correct as Correct,
    EntropyGuard as EntropyGuard,
    Finding as Finding,
    Guard as Guard,
    GuardAction as GuardAction,
    KLGuard as KLGuard,
    Mask as Mask,
    MetricFloorGuard as MetricFloorGuard,
    MetricGuard as MetricGuard,
    NonFiniteGuard as NonFiniteGuard,
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
    RolloutWriter as RolloutWriter,
)
from lightning_rl.callbacks.report import (
    RunReport as RunReport,
)
from lightning_rl.callbacks.rerun_recorder import (
    RerunRecorder as RerunRecorder,
)
from lightning_rl.callbacks.reward_alarms import (
    RewardAlarms as RewardAlarms,
)
from lightning_rl.callbacks.watchdog import (
    Watchdog as Watchdog,
)
from lightning_rl.callbacks.weight_sync import (
    WeightSync as WeightSync,
)
