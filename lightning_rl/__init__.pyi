"""The names that most runs need, each from its module; other packages have theirs beside it."""

from lightning_rl.agents.base import (
    SingleTurn as SingleTurn,
)
from lightning_rl.agents.branching import (
    Branching as Branching,
)
from lightning_rl.agents.multi_turn import (
    MultiTurn as MultiTurn,
)
from lightning_rl.agents.thinking import (
    ThinkingBudget as ThinkingBudget,
)
from lightning_rl.agents.tools import (
    ToolAgent as ToolAgent,
)
from lightning_rl.algos.advantages import (
    GAE as GAE,
    GRPO as GRPO,
)
from lightning_rl.algos.baselines import (
    GDPO as GDPO,
    OPMD as OPMD,
    RLOO as RLOO,
    DrGRPO as DrGRPO,
    MaxRL as MaxRL,
    PassAtK as PassAtK,
    ReinforcePlusPlus as ReinforcePlusPlus,
    ReMax as ReMax,
    RunningBaseline as RunningBaseline,
)
from lightning_rl.algos.correction import (
    GeometricMIS as GeometricMIS,
    GeometricTIS as GeometricTIS,
    SequenceMIS as SequenceMIS,
    SequenceTIS as SequenceTIS,
    TokenMIS as TokenMIS,
    TokenTIS as TokenTIS,
)
from lightning_rl.algos.distillation import (
    Distillation as Distillation,
    TeacherDivergence as TeacherDivergence,
)
from lightning_rl.algos.kl import (
    EntropyBonus as EntropyBonus,
    K1Penalty as K1Penalty,
    K2Penalty as K2Penalty,
    K3Penalty as K3Penalty,
)
from lightning_rl.algos.losses import (
    CISPO as CISPO,
    GSPO as GSPO,
    SAPO as SAPO,
    PPOClip as PPOClip,
    Reinforce as Reinforce,
    SFTMix as SFTMix,
    Surrogate as Surrogate,
)
from lightning_rl.algos.objective import (
    PromptMean as PromptMean,
    SequenceMean as SequenceMean,
    TokenMean as TokenMean,
    TokenSum as TokenSum,
)
from lightning_rl.algos.tree import (
    TreeRLOO as TreeRLOO,
)
from lightning_rl.algos.trust_regions import (
    DPPO as DPPO,
    GMPO as GMPO,
    TOPR as TOPR,
    VESPO as VESPO,
    OffPolicyMask as OffPolicyMask,
)
from lightning_rl.algos.turns import (
    GiGPO as GiGPO,
    RewardToGo as RewardToGo,
    TurnGAE as TurnGAE,
)
from lightning_rl.callbacks.checkpoint import (
    IterationCheckpoint as IterationCheckpoint,
)
from lightning_rl.callbacks.evaluate import (
    Evaluate as Evaluate,
)
from lightning_rl.callbacks.evaluate_rollouts import (
    EvaluateRollouts as EvaluateRollouts,
)
from lightning_rl.callbacks.export import (
    HFExport as HFExport,
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
from lightning_rl.callbacks.watchdog import (
    Watchdog as Watchdog,
)
from lightning_rl.callbacks.weight_sync import (
    WeightSync as WeightSync,
)
from lightning_rl.cli.trainer import (
    RLTrainer as RLTrainer,
)
from lightning_rl.collect.collector import (
    RewardSpread as RewardSpread,
    SyncCollector as SyncCollector,
)
from lightning_rl.collect.demonstrations import (
    DemonstrationRows as DemonstrationRows,
)
from lightning_rl.collect.evaluation import (
    Evaluation as Evaluation,
)
from lightning_rl.collect.mixture import (
    Mixture as Mixture,
    PromptSet as PromptSet,
)
from lightning_rl.collect.partial import (
    PartialCollector as PartialCollector,
)
from lightning_rl.collect.prefetch import (
    AsyncCollector as AsyncCollector,
    OneStepOffCollector as OneStepOffCollector,
)
from lightning_rl.collect.replay_buffer import (
    ReplayBuffer as ReplayBuffer,
)
from lightning_rl.collect.selection import (
    GroupSelection as GroupSelection,
)
from lightning_rl.collect.streamed import (
    StreamedCollector as StreamedCollector,
)
from lightning_rl.data.curriculum import (
    PassRateCurriculum as PassRateCurriculum,
)
from lightning_rl.data.sources import (
    HFDatasetPrompts as HFDatasetPrompts,
    IterablePrompts as IterablePrompts,
    JSONLPrompts as JSONLPrompts,
    ParquetPrompts as ParquetPrompts,
    ReasoningGymPrompts as ReasoningGymPrompts,
)
from lightning_rl.data.streaming import (
    HFStreamingPrompts as HFStreamingPrompts,
)
from lightning_rl.datamodule import (
    RLDataModule as RLDataModule,
)
from lightning_rl.engines import (
    RayEngine as RayEngine,
    Sampling as Sampling,
    StructuredOutputs as StructuredOutputs,
    TransformersEngine as TransformersEngine,
    VLLMLocal as VLLMLocal,
    VLLMServer as VLLMServer,
)
from lightning_rl.errors import (
    LightningRLError as LightningRLError,
)
from lightning_rl.learn.critic import (
    Critic as Critic,
)
from lightning_rl.learn.dpo import (
    DPOModule as DPOModule,
    PairDataModule as PairDataModule,
    RolloutPairs as RolloutPairs,
)
from lightning_rl.learn.kto import (
    KTODataModule as KTODataModule,
    KTOModule as KTOModule,
)
from lightning_rl.learn.offline import (
    OfflineDataModule as OfflineDataModule,
)
from lightning_rl.learn.reward_model import (
    RewardModelModule as RewardModelModule,
    RewardPairDataModule as RewardPairDataModule,
)
from lightning_rl.learn.schedulers import (
    WarmupConstant as WarmupConstant,
    WarmupCosine as WarmupCosine,
    WarmupLinear as WarmupLinear,
)
from lightning_rl.learn.sft import (
    SFTDataModule as SFTDataModule,
    SFTModule as SFTModule,
)
from lightning_rl.learn.update_settings import (
    UpdateSettings as UpdateSettings,
)
from lightning_rl.models.heads import (
    SeparateValueHead as SeparateValueHead,
    SharedValueHead as SharedValueHead,
)
from lightning_rl.models.lora import (
    LoRA as LoRA,
)
from lightning_rl.models.parallel.strategy import (
    ShardedStrategy as ShardedStrategy,
)
from lightning_rl.models.pretrained import (
    Loading as Loading,
)
from lightning_rl.models.quantization import (
    NF4 as NF4,
    Int8 as Int8,
)
from lightning_rl.models.recompute import (
    Recompute as Recompute,
)
from lightning_rl.models.reference import (
    BaseReference as BaseReference,
    FrozenReference as FrozenReference,
    PeriodicReference as PeriodicReference,
)
from lightning_rl.module import (
    PolicyModule as PolicyModule,
)
from lightning_rl.rewards.base import (
    Rewards as Rewards,
)
from lightning_rl.rewards.judge import (
    LLMJudge as LLMJudge,
)
from lightning_rl.rewards.length import (
    LengthReward as LengthReward,
)
from lightning_rl.rewards.math_answers import (
    MathVerify as MathVerify,
)
from lightning_rl.rewards.model_reward import (
    ModelReward as ModelReward,
    ServedReward as ServedReward,
)
from lightning_rl.rewards.pool import (
    Isolated as Isolated,
)
from lightning_rl.rewards.ranking import (
    RankingJudge as RankingJudge,
)
from lightning_rl.rewards.remote import (
    Remote as Remote,
)
from lightning_rl.rewards.rubric import (
    RubricJudge as RubricJudge,
)
from lightning_rl.rewards.rules import (
    EnvironmentReward as EnvironmentReward,
    OverlongPenalty as OverlongPenalty,
    PythonTests as PythonTests,
)
from lightning_rl.rewards.served_teacher import (
    ServedTeacher as ServedTeacher,
)
from lightning_rl.rewards.teachers import (
    ModelTeacher as ModelTeacher,
)
from lightning_rl.rollout import (
    Prompt as Prompt,
    Rollout as Rollout,
)
from lightning_rl.sync.checkpoint import (
    CheckpointTransport as CheckpointTransport,
)
from lightning_rl.sync.collective import (
    CollectiveTransport as CollectiveTransport,
)
from lightning_rl.sync.memory import (
    MemoryTransport as MemoryTransport,
)
from lightning_rl.sync.schedule import (
    FixedSchedule as FixedSchedule,
)
from lightning_rl.vision.limits import (
    PictureLimits as PictureLimits,
)
from lightning_rl.vision.training import (
    Vision as Vision,
)
