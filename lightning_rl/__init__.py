"""Reinforcement-learning post-training of language models, in plain Lightning.

Importing this package is quick: names are loaded when first used, vLLM only when an engine starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.agents.base import Agent, SingleTurn
    from lightning_rl.algos.advantages import GAE, GRPO, Advantage
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
        SequenceMIS,
        SequenceTIS,
        TokenMIS,
        TokenTIS,
    )
    from lightning_rl.algos.entropy import EntropyBonus, LinearEntropyBonus
    from lightning_rl.algos.group_advantages import OPMD, RLOO, DrGRPO, MaxRL, PassAtK
    from lightning_rl.algos.kl import (
        AdaptiveCoefficient,
        Coefficient,
        K1Penalty,
        K2Penalty,
        K3Penalty,
        KLPenalty,
    )
    from lightning_rl.algos.losses import PolicyLoss, PPOClip, ValueLoss
    from lightning_rl.algos.ratio_losses import CISPO, GSPO, SAPO, Reinforce, SFTMix
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
    from lightning_rl.collect.collector import Collector, SyncCollector
    from lightning_rl.collect.filters import GroupFilter, RewardSpread
    from lightning_rl.collect.pipeline import RolloutPipeline
    from lightning_rl.data.packing import pack_rollouts
    from lightning_rl.data.prompts import PromptDataset
    from lightning_rl.data.reasoning_gym import ReasoningGymPrompts
    from lightning_rl.data.sources import (
        HFDatasetPrompts,
        IterablePrompts,
        JSONLPrompts,
        ParquetPrompts,
    )
    from lightning_rl.datamodule import RLDataModule
    from lightning_rl.dpo import DPOModule, PairDataModule, RolloutPairs
    from lightning_rl.engines import Engine, Sampling, TransformersEngine, VLLMLocal
    from lightning_rl.errors import (
        ConfigError,
        DataError,
        EngineError,
        FilterError,
        LightningRLError,
        RewardError,
        WeightSyncError,
    )
    from lightning_rl.models.heads import SeparateValueHead, SharedValueHead, ValueHead
    from lightning_rl.models.lora import LoRA
    from lightning_rl.models.policy import Policy
    from lightning_rl.models.reference import (
        BaseReference,
        FrozenReference,
        PeriodicReference,
        Reference,
    )
    from lightning_rl.module import PolicyModule
    from lightning_rl.rewards.base import Rewards
    from lightning_rl.rewards.rules import OverlongPenalty
    from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
    from lightning_rl.schedulers import WarmupConstant, WarmupCosine, WarmupLinear
    from lightning_rl.sft import SFTDataModule, SFTModule
    from lightning_rl.sync.base import WeightTransport
    from lightning_rl.sync.memory import MemoryTransport
    from lightning_rl.sync.schedule import FixedSchedule, SyncSchedule, SyncState

_PLACES = {
    "agents.base": ("Agent", "SingleTurn"),
    "algos.advantages": ("GAE", "GRPO", "Advantage"),
    "algos.aggregation": ("Aggregation", "PromptMean", "SequenceMean", "TokenMean", "TokenSum"),
    "algos.batch_advantages": ("ReinforcePlusPlus", "RunningBaseline"),
    "algos.correction": ("Correction", "SequenceMIS", "SequenceTIS", "TokenMIS", "TokenTIS"),
    "algos.entropy": ("EntropyBonus", "LinearEntropyBonus"),
    "algos.group_advantages": ("DrGRPO", "MaxRL", "OPMD", "PassAtK", "RLOO"),
    "algos.kl": (
        "AdaptiveCoefficient",
        "Coefficient",
        "K1Penalty",
        "K2Penalty",
        "K3Penalty",
        "KLPenalty",
    ),
    "algos.losses": ("PPOClip", "PolicyLoss", "ValueLoss"),
    "algos.ratio_losses": ("CISPO", "GSPO", "Reinforce", "SAPO", "SFTMix"),
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
    "collect.collector": ("Collector", "SyncCollector"),
    "collect.filters": ("GroupFilter", "RewardSpread"),
    "collect.pipeline": ("RolloutPipeline",),
    "data.packing": ("pack_rollouts",),
    "data.prompts": ("PromptDataset",),
    "data.reasoning_gym": ("ReasoningGymPrompts",),
    "data.sources": ("HFDatasetPrompts", "IterablePrompts", "JSONLPrompts", "ParquetPrompts"),
    "datamodule": ("RLDataModule",),
    "dpo": ("DPOModule", "PairDataModule", "RolloutPairs"),
    "engines": ("Engine", "Sampling", "TransformersEngine", "VLLMLocal"),
    "errors": (
        "ConfigError",
        "DataError",
        "EngineError",
        "FilterError",
        "LightningRLError",
        "RewardError",
        "WeightSyncError",
    ),
    "models.heads": ("SeparateValueHead", "SharedValueHead", "ValueHead"),
    "models.lora": ("LoRA",),
    "models.policy": ("Policy",),
    "models.reference": ("BaseReference", "FrozenReference", "PeriodicReference", "Reference"),
    "module": ("PolicyModule",),
    "rewards.base": ("Rewards",),
    "rewards.rules": ("OverlongPenalty",),
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
