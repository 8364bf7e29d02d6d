"""Reinforcement-learning post-training of language models, in plain Lightning.

Importing this package is quick: names are loaded when first used, vLLM only when an engine starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.agents.base import Agent, SingleTurn
    from lightning_rl.agents.environment import Environment, Reply
    from lightning_rl.agents.multi_turn import MultiTurn
    from lightning_rl.agents.parsers import HermesParser, ParsedCall, ToolParser, VLLMParser
    from lightning_rl.agents.templates import TurnTemplate
    from lightning_rl.agents.tool_agent import ToolAgent
    from lightning_rl.agents.turns import append_given, generate_turn, room
    from lightning_rl.agents.verifiers import VerifiersEnvironment, VerifiersPrompts
    from lightning_rl.algos.advantages import (
        GAE,
        GRPO,
        Advantage,
        group_means,
        group_stds,
        spread_over_tokens,
        total_rewards,
    )
    from lightning_rl.algos.aggregation import (
        Aggregation,
        PromptMean,
        SequenceMean,
        TokenMean,
        TokenSum,
    )
    from lightning_rl.algos.batch_advantages import ReinforcePlusPlus, RunningBaseline
    from lightning_rl.algos.correction import (
        Correction,
        GeometricMIS,
        GeometricTIS,
        SequenceMIS,
        SequenceTIS,
        TokenMIS,
        TokenTIS,
    )
    from lightning_rl.algos.entropy import EntropyBonus, LinearEntropyBonus
    from lightning_rl.algos.group_advantages import (
        OPMD,
        RLOO,
        DrGRPO,
        GroupAdvantage,
        MaxRL,
        PassAtK,
    )
    from lightning_rl.algos.kl import (
        AdaptiveCoefficient,
        Coefficient,
        K1Penalty,
        K2Penalty,
        K3Penalty,
        KLPenalty,
    )
    from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, ValueLoss, ppo_clip
    from lightning_rl.algos.ratio_losses import CISPO, GSPO, SAPO, Reinforce, SFTMix, row_means
    from lightning_rl.arguments import configurable
    from lightning_rl.buffer.base import RolloutFile
    from lightning_rl.buffer.files import open_rollouts
    from lightning_rl.buffer.replay import ReplayBuffer
    from lightning_rl.buffer.samplers import (
        FIFO,
        AdvantagePriority,
        Entry,
        Mixed,
        RewardPriority,
        Sampler,
        Uniform,
    )
    from lightning_rl.buffer.store import RolloutStore
    from lightning_rl.callbacks import (
        BatchGuard,
        Correct,
        EffectiveSampleGuard,
        EntropyGuard,
        Evaluate,
        Finding,
        Guard,
        GuardAction,
        HFExport,
        IterationCheckpoint,
        KLGuard,
        LearningAlarms,
        LogprobGapGuard,
        LogprobSpikeGuard,
        Mask,
        MetricFloorGuard,
        MetricGuard,
        NonFiniteGuard,
        ParameterSummary,
        PreviewTable,
        ReplayRecorder,
        RewardAlarmGuard,
        RewardAlarms,
        RLCallback,
        RLProgressBar,
        RolloutRecorder,
        RolloutWriter,
        RunReport,
        SkipUpdate,
        StalenessGuard,
        StepTimer,
        StopRun,
        Warn,
        Watchdog,
        WeightSync,
        ZeroAdvantageGuard,
    )
    from lightning_rl.checkpoint_io import VerifiedCheckpointIO
    from lightning_rl.collect.async_collector import AsyncCollector, OneStepOffCollector
    from lightning_rl.collect.collector import Collector, CollectorStatus, SyncCollector
    from lightning_rl.collect.early_cut import (
        PartialCollector,
        PartialTailCollector,
        TailBatchingCollector,
    )
    from lightning_rl.collect.filters import GroupFilter, RewardSpread
    from lightning_rl.collect.pipeline import RolloutPipeline
    from lightning_rl.collect.source import GroupSource
    from lightning_rl.data.curriculum import PassRateCurriculum
    from lightning_rl.data.packing import pack_rollouts, token_rows
    from lightning_rl.data.prompts import PromptDataset
    from lightning_rl.data.reasoning_gym import ReasoningGymPrompts
    from lightning_rl.data.sources import (
        HFDatasetPrompts,
        IterablePrompts,
        JSONLPrompts,
        ParquetPrompts,
    )
    from lightning_rl.data.views import as_padded, as_steps, as_torchrl
    from lightning_rl.datamodule import RLDataModule
    from lightning_rl.dist import global_mean_std
    from lightning_rl.dist_fabric import FabricDDP
    from lightning_rl.dpo import DPOModule, PairDataModule, RolloutPairs
    from lightning_rl.engines import (
        Completion,
        Engine,
        RayEngine,
        Sampling,
        StructuredOutputs,
        TransformersEngine,
        VLLMLocal,
        VLLMServer,
    )
    from lightning_rl.engines.base import require_same_weights
    from lightning_rl.engines.status import ReplicaStatus, RunState
    from lightning_rl.errors import (
        AgentError,
        CheckpointError,
        ConfigError,
        DamagedWeightsError,
        DataError,
        DiskError,
        EngineError,
        FilterError,
        GuardError,
        IncompleteWeightsError,
        LightningRLError,
        NonFiniteWeightsError,
        PackMemoryError,
        ReplicaError,
        RewardError,
        RunInterrupted,
        StaleWeightsError,
        StalledError,
        SyncTimeoutError,
        WeightSyncError,
    )
    from lightning_rl.masters import MasterWeights
    from lightning_rl.models.attention import PackLayout
    from lightning_rl.models.heads import SeparateValueHead, SharedValueHead, ValueHead
    from lightning_rl.models.lora import LoRA
    from lightning_rl.models.policy import Policy, Scores, load_tokenizer, save_skeleton
    from lightning_rl.models.reference import (
        BaseReference,
        FrozenReference,
        PeriodicReference,
        Reference,
    )
    from lightning_rl.module import PolicyModule
    from lightning_rl.offline import OfflineDataModule
    from lightning_rl.precision import BFloat16Precision
    from lightning_rl.rewards.base import RewardFailure, Rewards, batch_reward
    from lightning_rl.rewards.code import PythonTests
    from lightning_rl.rewards.environment import EnvironmentReward
    from lightning_rl.rewards.judge import LLMJudge
    from lightning_rl.rewards.judge_models import EngineJudge, JudgeError, JudgeModel, OpenAIJudge
    from lightning_rl.rewards.log import TrainerState
    from lightning_rl.rewards.pool import Isolated
    from lightning_rl.rewards.remote import Remote, retry
    from lightning_rl.rewards.rules import OverlongPenalty
    from lightning_rl.rollout import Group, Message, Prompt, Rollout, RolloutStatus
    from lightning_rl.schedulers import WarmupConstant, WarmupCosine, WarmupLinear
    from lightning_rl.sft import SFTDataModule, SFTModule
    from lightning_rl.strategies import ShardedStrategy
    from lightning_rl.sync.base import WeightTransport
    from lightning_rl.sync.checkpoint import CheckpointTransport
    from lightning_rl.sync.collective import CollectiveTransport
    from lightning_rl.sync.memory import MemoryTransport
    from lightning_rl.sync.native import IPCTransport, NCCLTransport
    from lightning_rl.sync.schedule import (
        CollectorSchedule,
        FixedSchedule,
        SyncSchedule,
        SyncState,
        TrainerSchedule,
    )
    from lightning_rl.sync.verify import probe_gap

_PLACES = {
    "sync.verify": ("probe_gap",),
    "models.attention": ("PackLayout",),
    "engines.base": ("require_same_weights",),
    "dist": ("global_mean_std",),
    "arguments": ("configurable",),
    "agents.turns": (
        "append_given",
        "generate_turn",
        "room",
    ),
    "agents.base": ("Agent", "SingleTurn"),
    "agents.environment": ("Environment", "Reply"),
    "agents.multi_turn": ("MultiTurn",),
    "agents.parsers": ("HermesParser", "ParsedCall", "ToolParser", "VLLMParser"),
    "agents.templates": ("TurnTemplate",),
    "agents.tool_agent": ("ToolAgent",),
    "agents.verifiers": ("VerifiersEnvironment", "VerifiersPrompts"),
    "algos.advantages": (
        "GAE",
        "GRPO",
        "Advantage",
        "group_means",
        "group_stds",
        "spread_over_tokens",
        "total_rewards",
    ),
    "algos.aggregation": ("Aggregation", "PromptMean", "SequenceMean", "TokenMean", "TokenSum"),
    "algos.batch_advantages": ("ReinforcePlusPlus", "RunningBaseline"),
    "algos.correction": (
        "Correction",
        "GeometricMIS",
        "GeometricTIS",
        "SequenceMIS",
        "SequenceTIS",
        "TokenMIS",
        "TokenTIS",
    ),
    "algos.entropy": ("EntropyBonus", "LinearEntropyBonus"),
    "algos.group_advantages": (
        "DrGRPO",
        "MaxRL",
        "OPMD",
        "PassAtK",
        "RLOO",
        "GroupAdvantage",
    ),
    "algos.kl": (
        "AdaptiveCoefficient",
        "Coefficient",
        "K1Penalty",
        "K2Penalty",
        "K3Penalty",
        "KLPenalty",
    ),
    "algos.losses": (
        "PPOClip",
        "PolicyLoss",
        "ValueLoss",
        "Metrics",
        "ppo_clip",
    ),
    "algos.ratio_losses": (
        "CISPO",
        "GSPO",
        "Reinforce",
        "SAPO",
        "SFTMix",
        "row_means",
    ),
    "buffer.base": ("RolloutFile",),
    "buffer.files": ("open_rollouts",),
    "buffer.replay": ("ReplayBuffer",),
    "buffer.samplers": (
        "AdvantagePriority",
        "FIFO",
        "Mixed",
        "RewardPriority",
        "Sampler",
        "Uniform",
        "Entry",
    ),
    "buffer.store": ("RolloutStore",),
    "callbacks": (
        "Evaluate",
        "HFExport",
        "IterationCheckpoint",
        "LearningAlarms",
        "ParameterSummary",
        "PreviewTable",
        "RLCallback",
        "RLProgressBar",
        "ReplayRecorder",
        "RewardAlarms",
        "RolloutRecorder",
        "RolloutWriter",
        "RunReport",
        "StepTimer",
        "WeightSync",
        "BatchGuard",
        "Correct",
        "EffectiveSampleGuard",
        "EntropyGuard",
        "Guard",
        "GuardAction",
        "KLGuard",
        "LogprobGapGuard",
        "LogprobSpikeGuard",
        "Mask",
        "MetricFloorGuard",
        "MetricGuard",
        "NonFiniteGuard",
        "RewardAlarmGuard",
        "SkipUpdate",
        "StalenessGuard",
        "StopRun",
        "Warn",
        "Watchdog",
        "ZeroAdvantageGuard",
        "Finding",
    ),
    "checkpoint_io": ("VerifiedCheckpointIO",),
    "collect.async_collector": ("AsyncCollector", "OneStepOffCollector"),
    "collect.collector": ("Collector", "CollectorStatus", "SyncCollector"),
    "collect.early_cut": ("PartialCollector", "PartialTailCollector", "TailBatchingCollector"),
    "collect.filters": ("GroupFilter", "RewardSpread"),
    "collect.pipeline": ("RolloutPipeline",),
    "collect.source": ("GroupSource",),
    "data.curriculum": ("PassRateCurriculum",),
    "data.packing": (
        "pack_rollouts",
        "token_rows",
    ),
    "data.prompts": ("PromptDataset",),
    "data.reasoning_gym": ("ReasoningGymPrompts",),
    "data.sources": ("HFDatasetPrompts", "IterablePrompts", "JSONLPrompts", "ParquetPrompts"),
    "data.views": ("as_padded", "as_steps", "as_torchrl"),
    "datamodule": ("RLDataModule",),
    "dist_fabric": ("FabricDDP",),
    "dpo": ("DPOModule", "PairDataModule", "RolloutPairs"),
    "engines": (
        "Engine",
        "RayEngine",
        "Sampling",
        "StructuredOutputs",
        "TransformersEngine",
        "VLLMLocal",
        "VLLMServer",
        "Completion",
    ),
    "engines.status": ("ReplicaStatus", "RunState"),
    "errors": (
        "AgentError",
        "CheckpointError",
        "ConfigError",
        "DamagedWeightsError",
        "DataError",
        "DiskError",
        "EngineError",
        "FilterError",
        "IncompleteWeightsError",
        "LightningRLError",
        "NonFiniteWeightsError",
        "ReplicaError",
        "RewardError",
        "RunInterrupted",
        "StaleWeightsError",
        "SyncTimeoutError",
        "WeightSyncError",
        "GuardError",
        "PackMemoryError",
        "StalledError",
    ),
    "models.heads": ("SeparateValueHead", "SharedValueHead", "ValueHead"),
    "models.lora": ("LoRA",),
    "models.policy": (
        "Policy",
        "Scores",
        "load_tokenizer",
        "save_skeleton",
    ),
    "models.reference": ("BaseReference", "FrozenReference", "PeriodicReference", "Reference"),
    "masters": ("MasterWeights",),
    "module": ("PolicyModule",),
    "offline": ("OfflineDataModule",),
    "precision": ("BFloat16Precision",),
    "rewards.base": ("RewardFailure", "Rewards", "batch_reward"),
    "rewards.code": ("PythonTests",),
    "rewards.environment": ("EnvironmentReward",),
    "rewards.judge": ("LLMJudge",),
    "rewards.judge_models": ("EngineJudge", "JudgeError", "JudgeModel", "OpenAIJudge"),
    "rewards.log": ("TrainerState",),
    "rewards.pool": ("Isolated",),
    "rewards.remote": ("Remote", "retry"),
    "rewards.rules": ("OverlongPenalty",),
    "rollout": (
        "Prompt",
        "Rollout",
        "RolloutStatus",
        "Group",
        "Message",
    ),
    "schedulers": ("WarmupConstant", "WarmupCosine", "WarmupLinear"),
    "sft": ("SFTDataModule", "SFTModule"),
    "strategies": ("ShardedStrategy",),
    "sync.base": ("WeightTransport",),
    "sync.checkpoint": ("CheckpointTransport",),
    "sync.collective": ("CollectiveTransport",),
    "sync.native": ("IPCTransport", "NCCLTransport"),
    "sync.memory": ("MemoryTransport",),
    "sync.schedule": (
        "CollectorSchedule",
        "FixedSchedule",
        "SyncSchedule",
        "SyncState",
        "TrainerSchedule",
    ),
}
_MODULE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
    return getattr(import_module(f"lightning_rl.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
