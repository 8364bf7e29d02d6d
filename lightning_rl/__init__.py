"""Reinforcement-learning post-training of language models, in plain Lightning.

Importing this package is quick: names are loaded when first used, vLLM only when an engine starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.algos.advantages import GAE, GRPO, Advantage
    from lightning_rl.algos.aggregation import Aggregation, SequenceMean, TokenMean
    from lightning_rl.algos.kl import K3Penalty, KLPenalty
    from lightning_rl.algos.losses import PolicyLoss, PPOClip, ValueLoss
    from lightning_rl.callbacks import (
        Evaluate,
        HFExport,
        PreviewTable,
        RLCallback,
        RLProgressBar,
        RolloutWriter,
        RunReport,
        StepTimer,
        WeightSync,
    )
    from lightning_rl.collect.agents import Agent, SingleTurn
    from lightning_rl.collect.collector import Collector, SyncCollector
    from lightning_rl.collect.pipeline import RolloutPipeline
    from lightning_rl.data.packing import pack_rollouts
    from lightning_rl.data.prompts import (
        HFDatasetPrompts,
        IterablePrompts,
        JSONLPrompts,
        ParquetPrompts,
        PromptDataset,
    )
    from lightning_rl.data.reasoning_gym import ReasoningGymPrompts
    from lightning_rl.datamodule import RLDataModule
    from lightning_rl.engines import Engine, Sampling, TransformersEngine, VLLMLocal
    from lightning_rl.errors import (
        ConfigError,
        DataError,
        EngineError,
        LightningRLError,
        RewardError,
        WeightSyncError,
    )
    from lightning_rl.models.heads import SeparateValueHead, SharedValueHead, ValueHead
    from lightning_rl.models.policy import Policy
    from lightning_rl.module import PolicyModule
    from lightning_rl.rewards.base import Rewards
    from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
    from lightning_rl.schedulers import WarmupConstant, WarmupCosine, WarmupLinear
    from lightning_rl.sft import SFTDataModule, SFTModule
    from lightning_rl.sync.base import WeightTransport
    from lightning_rl.sync.memory import MemoryTransport
    from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule, SyncState

_PLACES = {
    "algos.advantages": ("GAE", "GRPO", "Advantage"),
    "algos.aggregation": ("Aggregation", "SequenceMean", "TokenMean"),
    "algos.kl": ("K3Penalty", "KLPenalty"),
    "algos.losses": ("PPOClip", "PolicyLoss", "ValueLoss"),
    "callbacks": (
        "Evaluate",
        "HFExport",
        "PreviewTable",
        "RLCallback",
        "RLProgressBar",
        "RolloutWriter",
        "RunReport",
        "StepTimer",
        "WeightSync",
    ),
    "collect.agents": ("Agent", "SingleTurn"),
    "collect.collector": ("Collector", "SyncCollector"),
    "collect.pipeline": ("RolloutPipeline",),
    "data.packing": ("pack_rollouts",),
    "data.prompts": (
        "HFDatasetPrompts",
        "IterablePrompts",
        "JSONLPrompts",
        "ParquetPrompts",
        "PromptDataset",
    ),
    "data.reasoning_gym": ("ReasoningGymPrompts",),
    "datamodule": ("RLDataModule",),
    "engines": ("Engine", "Sampling", "TransformersEngine", "VLLMLocal"),
    "errors": (
        "ConfigError",
        "DataError",
        "EngineError",
        "LightningRLError",
        "RewardError",
        "WeightSyncError",
    ),
    "models.heads": ("SeparateValueHead", "SharedValueHead", "ValueHead"),
    "models.policy": ("Policy",),
    "module": ("PolicyModule",),
    "rewards.base": ("Rewards",),
    "rollout": ("Prompt", "Rollout", "RolloutStatus"),
    "schedulers": ("WarmupConstant", "WarmupCosine", "WarmupLinear"),
    "sft": ("SFTDataModule", "SFTModule"),
    "sync.base": ("WeightTransport",),
    "sync.memory": ("MemoryTransport",),
    "sync.schedule": ("FixedSchedule", "SyncSchedule", "SyncState"),
}
_MODULE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
    return getattr(import_module(f"lightning_rl.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
