"""The only list of public names, each from its module; read when the package is imported."""

from lightning_rl.agents.base import (
    Agent as Agent,
    Environment as Environment,
    Reply as Reply,
    SingleTurn as SingleTurn,
    append_given as append_given,
    generate_turn as generate_turn,
    room as room,
)
from lightning_rl.agents.branching import (
    Branching as Branching,
    EveryCall as EveryCall,
    ForkPoints as ForkPoints,
    RandomCalls as RandomCalls,
    TheseCalls as TheseCalls,
    forked as forked,
)
from lightning_rl.agents.episode import Episode as Episode
from lightning_rl.agents.multi_turn import MultiTurn as MultiTurn
from lightning_rl.agents.templates import (
    HermesParser as HermesParser,
    ParsedCall as ParsedCall,
    ToolParser as ToolParser,
    TurnTemplate as TurnTemplate,
    VLLMParser as VLLMParser,
)
from lightning_rl.agents.tools import ToolAgent as ToolAgent
from lightning_rl.algos.advantages import (
    GAE as GAE,
    GRPO as GRPO,
    Advantage as Advantage,
    GroupAdvantage as GroupAdvantage,
    group_means as group_means,
    group_stds as group_stds,
    spread_over_tokens as spread_over_tokens,
    total_rewards as total_rewards,
)
from lightning_rl.algos.baselines import (
    OPMD as OPMD,
    RLOO as RLOO,
    DrGRPO as DrGRPO,
    MaxRL as MaxRL,
    PassAtK as PassAtK,
    ReinforcePlusPlus as ReinforcePlusPlus,
    RunningBaseline as RunningBaseline,
)
from lightning_rl.algos.correction import (
    Correction as Correction,
    GeometricMIS as GeometricMIS,
    GeometricTIS as GeometricTIS,
    SequenceMIS as SequenceMIS,
    SequenceTIS as SequenceTIS,
    TokenMIS as TokenMIS,
    TokenTIS as TokenTIS,
)
from lightning_rl.algos.kl import (
    EntropyBonus as EntropyBonus,
    K1Penalty as K1Penalty,
    K2Penalty as K2Penalty,
    K3Penalty as K3Penalty,
    KLPenalty as KLPenalty,
)
from lightning_rl.algos.losses import (
    CISPO as CISPO,
    GSPO as GSPO,
    SAPO as SAPO,
    Metrics as Metrics,
    PolicyLoss as PolicyLoss,
    PPOClip as PPOClip,
    Reinforce as Reinforce,
    SFTMix as SFTMix,
    Surrogate as Surrogate,
    ValueLoss as ValueLoss,
    ppo_clip as ppo_clip,
    row_means as row_means,
)
from lightning_rl.algos.objective import (
    Aggregation as Aggregation,
    Decision as Decision,
    PromptMean as PromptMean,
    SequenceMean as SequenceMean,
    TokenMean as TokenMean,
    TokenSum as TokenSum,
)
from lightning_rl.algos.schedules import (
    AdaptiveCoefficient as AdaptiveCoefficient,
    AdaptiveKL as AdaptiveKL,
    AdaptiveSchedule as AdaptiveSchedule,
    ConstantSchedule as ConstantSchedule,
    ExponentialSchedule as ExponentialSchedule,
    LinearSchedule as LinearSchedule,
    Schedule as Schedule,
)
from lightning_rl.algos.tree import TreeRLOO as TreeRLOO
from lightning_rl.algos.turns import (
    GiGPO as GiGPO,
    RewardToGo as RewardToGo,
    TurnGAE as TurnGAE,
)
from lightning_rl.callbacks import (
    BatchGuard as BatchGuard,
    Correct as Correct,
    EffectiveSampleGuard as EffectiveSampleGuard,
    EntropyGuard as EntropyGuard,
    Evaluate as Evaluate,
    Finding as Finding,
    Guard as Guard,
    GuardAction as GuardAction,
    HFExport as HFExport,
    IterationCheckpoint as IterationCheckpoint,
    KLGuard as KLGuard,
    LearningAlarms as LearningAlarms,
    LogprobGapGuard as LogprobGapGuard,
    LogprobSpikeGuard as LogprobSpikeGuard,
    Mask as Mask,
    MetricFloorGuard as MetricFloorGuard,
    MetricGuard as MetricGuard,
    NonFiniteGuard as NonFiniteGuard,
    ParameterSummary as ParameterSummary,
    PreviewTable as PreviewTable,
    RerunRecorder as RerunRecorder,
    RewardAlarmGuard as RewardAlarmGuard,
    RewardAlarms as RewardAlarms,
    RLCallback as RLCallback,
    RLProgressBar as RLProgressBar,
    RolloutRecorder as RolloutRecorder,
    RolloutWriter as RolloutWriter,
    RunArtifacts as RunArtifacts,
    RunReport as RunReport,
    SkipUpdate as SkipUpdate,
    StalenessGuard as StalenessGuard,
    StepTimer as StepTimer,
    StopRun as StopRun,
    Warn as Warn,
    Watchdog as Watchdog,
    WeightSync as WeightSync,
    ZeroAdvantageGuard as ZeroAdvantageGuard,
)
from lightning_rl.cli.trainer import RLTrainer as RLTrainer
from lightning_rl.collect.ahead import (
    AsyncCollector as AsyncCollector,
    OneStepOffCollector as OneStepOffCollector,
)
from lightning_rl.collect.collector import (
    Collector as Collector,
    GroupFilter as GroupFilter,
    RewardSpread as RewardSpread,
    SyncCollector as SyncCollector,
)
from lightning_rl.collect.early_cut import (
    PartialCollector as PartialCollector,
    PartialTailCollector as PartialTailCollector,
    TailBatchingCollector as TailBatchingCollector,
)
from lightning_rl.collect.mixture import Mixture as Mixture, PromptSet as PromptSet
from lightning_rl.collect.peek import Peek as Peek
from lightning_rl.collect.pipeline import (
    GroupSource as GroupSource,
    RolloutPipeline as RolloutPipeline,
)
from lightning_rl.collect.replay_buffer import ReplayBuffer as ReplayBuffer
from lightning_rl.collect.samplers import (
    FIFO as FIFO,
    AdvantagePriority as AdvantagePriority,
    Entry as Entry,
    Mixed as Mixed,
    RewardPriority as RewardPriority,
    Sampler as Sampler,
    Uniform as Uniform,
)
from lightning_rl.collect.streamed import StreamedCollector as StreamedCollector
from lightning_rl.config.arguments import configurable as configurable
from lightning_rl.data.curriculum import PassRateCurriculum as PassRateCurriculum
from lightning_rl.data.mixing import (
    ByPassRate as ByPassRate,
    FixedWeights as FixedWeights,
    Mixing as Mixing,
    RoundRobin as RoundRobin,
)
from lightning_rl.data.packing import pack_rollouts as pack_rollouts, token_rows as token_rows
from lightning_rl.data.prompts import PromptDataset as PromptDataset
from lightning_rl.data.rollouts.files import (
    RolloutFile as RolloutFile,
    open_rollouts as open_rollouts,
)
from lightning_rl.data.rollouts.store import RolloutStore as RolloutStore
from lightning_rl.data.sources import (
    HFDatasetPrompts as HFDatasetPrompts,
    IterablePrompts as IterablePrompts,
    JSONLPrompts as JSONLPrompts,
    ParquetPrompts as ParquetPrompts,
    ReasoningGymPrompts as ReasoningGymPrompts,
)
from lightning_rl.data.views import (
    as_padded as as_padded,
    as_steps as as_steps,
    as_torchrl as as_torchrl,
)
from lightning_rl.datamodule import RLDataModule as RLDataModule
from lightning_rl.engines import (
    Completion as Completion,
    Engine as Engine,
    RayEngine as RayEngine,
    Sampling as Sampling,
    StructuredOutputs as StructuredOutputs,
    TransformersAdapters as TransformersAdapters,
    TransformersEngine as TransformersEngine,
    VLLMAdapters as VLLMAdapters,
    VLLMLocal as VLLMLocal,
    VLLMServer as VLLMServer,
)
from lightning_rl.engines.base import (
    ReplicaStatus as ReplicaStatus,
    RunState as RunState,
    require_same_weights as require_same_weights,
)
from lightning_rl.engines.policy_engines import PolicyEngines as PolicyEngines
from lightning_rl.envs.algos.steps import (
    StepAdvantage as StepAdvantage,
    StepGAE as StepGAE,
    StepReturn as StepReturn,
    Steps as Steps,
)
from lightning_rl.envs.algos.td import (
    HuberTD as HuberTD,
    SquaredTD as SquaredTD,
    TDLoss as TDLoss,
)
from lightning_rl.envs.base import EnvModule as EnvModule
from lightning_rl.envs.batches import steps_of as steps_of
from lightning_rl.envs.collector import (
    EnvCollector as EnvCollector,
    EnvEpisode as EnvEpisode,
    EnvError as EnvError,
)
from lightning_rl.envs.datamodule import EnvDataModule as EnvDataModule
from lightning_rl.envs.dqn import DQNModule as DQNModule
from lightning_rl.envs.episode_preview import EpisodePreview as EpisodePreview
from lightning_rl.envs.gym import Gym as Gym
from lightning_rl.envs.joint_loss import JointLoss as JointLoss
from lightning_rl.envs.maker import (
    EnvMaker as EnvMaker,
    TorchRLEnv as TorchRLEnv,
)
from lightning_rl.envs.module import ActorCriticModule as ActorCriticModule
from lightning_rl.envs.networks.actor_critic import ActorCritic as ActorCritic
from lightning_rl.envs.networks.agent import EnvAgent as EnvAgent
from lightning_rl.envs.networks.bodies import (
    Body as Body,
    CNNBody as CNNBody,
    MLPBody as MLPBody,
)
from lightning_rl.envs.networks.graph import GraphBody as GraphBody, NodeHead as NodeHead
from lightning_rl.envs.networks.groups import Centralized as Centralized, PerAgent as PerAgent
from lightning_rl.envs.networks.memory import GRUBody as GRUBody, RecurrentBody as RecurrentBody
from lightning_rl.envs.networks.policy_heads import (
    BernoulliHead as BernoulliHead,
    CategoricalHead as CategoricalHead,
    GaussianHead as GaussianHead,
    PolicyHead as PolicyHead,
    TanhGaussianHead as TanhGaussianHead,
)
from lightning_rl.envs.networks.q_agent import (
    DuelingHead as DuelingHead,
    QAgent as QAgent,
    QHead as QHead,
)
from lightning_rl.envs.networks.sac_agent import (
    ActionCritic as ActionCritic,
    SACAgent as SACAgent,
)
from lightning_rl.envs.networks.space import Space as Space
from lightning_rl.envs.networks.targets import (
    CopyEvery as CopyEvery,
    Polyak as Polyak,
    TargetUpdate as TargetUpdate,
)
from lightning_rl.envs.off_policy import OffPolicyModule as OffPolicyModule
from lightning_rl.envs.pool import PooledGym as PooledGym
from lightning_rl.envs.rows import Clips as Clips
from lightning_rl.envs.sac import SACModule as SACModule
from lightning_rl.envs.step_loss import StepLoss as StepLoss, TorchRLLoss as TorchRLLoss
from lightning_rl.envs.transitions import TransitionBuffer as TransitionBuffer
from lightning_rl.envs.workers import GymWorkers as GymWorkers
from lightning_rl.errors import (
    AgentError as AgentError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    ContextLengthError as ContextLengthError,
    DamagedWeightsError as DamagedWeightsError,
    DataError as DataError,
    DiskError as DiskError,
    EngineError as EngineError,
    EpisodeError as EpisodeError,
    FilterError as FilterError,
    FineTuneError as FineTuneError,
    GuardError as GuardError,
    IncompleteWeightsError as IncompleteWeightsError,
    LightningRLError as LightningRLError,
    NonFiniteWeightsError as NonFiniteWeightsError,
    PackMemoryError as PackMemoryError,
    ReplicaError as ReplicaError,
    RewardError as RewardError,
    RunInterrupted as RunInterrupted,
    StaleWeightsError as StaleWeightsError,
    StalledError as StalledError,
    SyncTimeoutError as SyncTimeoutError,
    WeightSyncError as WeightSyncError,
)
from lightning_rl.games.algos.game import (
    CrossFitted as CrossFitted,
    Game as Game,
    GamePoint as GamePoint,
)
from lightning_rl.games.algos.moves import (
    GameUpdate as GameUpdate,
    Move as Move,
)
from lightning_rl.games.algos.updates import (
    LOLA as LOLA,
    POLA as POLA,
    PSOS as PSOS,
    PSPG as PSPG,
    SOS as SOS,
    SPG as SPG,
    Simultaneous as Simultaneous,
)
from lightning_rl.games.label_heads import (
    ClassHead as ClassHead,
    LabelHead as LabelHead,
    NumberHead as NumberHead,
)
from lightning_rl.games.labelled import (
    FunctionData as FunctionData,
    LabelledData as LabelledData,
)
from lightning_rl.games.module import GameModule as GameModule
from lightning_rl.games.protocols.agent import ProtocolAgent as ProtocolAgent
from lightning_rl.games.protocols.base import (
    ACCEPT as ACCEPT,
    GO_ON as GO_ON,
    REJECT as REJECT,
    VERIFIER as VERIFIER,
    Protocol as Protocol,
)
from lightning_rl.games.protocols.chance import drawn as drawn
from lightning_rl.games.protocols.conversation import (
    Conversation as Conversation,
    Turn as Turn,
)
from lightning_rl.games.protocols.metrics import protocol_metrics as protocol_metrics
from lightning_rl.games.protocols.scenario import (
    Reading as Reading,
    Scenario as Scenario,
    Seat as Seat,
)
from lightning_rl.games.protocols.single_prover import (
    Adp as Adp,
    Nip as Nip,
    SoloVerifier as SoloVerifier,
)
from lightning_rl.games.protocols.text_scenario import (
    Instructions as Instructions,
    TextScenario as TextScenario,
)
from lightning_rl.games.protocols.two_provers import (
    Debate as Debate,
    MerlinArthur as MerlinArthur,
    Mnip as Mnip,
)
from lightning_rl.games.protocols.zero_knowledge import ZeroKnowledge as ZeroKnowledge
from lightning_rl.games.roles.game import GameRolesModule as GameRolesModule
from lightning_rl.games.roles.group import SharedModelGroup as SharedModelGroup
from lightning_rl.games.roles.module import RolesModule as RolesModule
from lightning_rl.games.simulation_loss import SimulationLoss as SimulationLoss
from lightning_rl.games.solo import (
    SoloDataModule as SoloDataModule,
    SoloModule as SoloModule,
)
from lightning_rl.games.staged.algorithm import StagedAlgorithm as StagedAlgorithm
from lightning_rl.games.staged.callbacks import (
    StagedCallback as StagedCallback,
    StagedLoggers as StagedLoggers,
)
from lightning_rl.games.staged.chat import (
    ChatAnswer as ChatAnswer,
    ChatModel as ChatModel,
    EngineChat as EngineChat,
    OpenAIChat as OpenAIChat,
)
from lightning_rl.games.staged.expert_iteration import (
    ExpertIteration as ExpertIteration,
    RewardThreshold as RewardThreshold,
    RewardWeighted as RewardWeighted,
    Selection as Selection,
)
from lightning_rl.games.staged.group import ChatGroup as ChatGroup
from lightning_rl.games.staged.interaction import Interaction as Interaction
from lightning_rl.games.staged.jobs import (
    FineTuneJobs as FineTuneJobs,
    JobReport as JobReport,
    JobRequest as JobRequest,
    JobStatus as JobStatus,
)
from lightning_rl.games.staged.local_jobs import LocalJobs as LocalJobs
from lightning_rl.games.staged.malt import MALT as MALT
from lightning_rl.games.staged.openai_jobs import OpenAIFineTuning as OpenAIFineTuning
from lightning_rl.games.staged.state import StagedState as StagedState
from lightning_rl.games.staged.trainer import StagedTrainer as StagedTrainer
from lightning_rl.games.staged.training_sets import (
    Demonstrations as Demonstrations,
    Example as Example,
    Pair as Pair,
    Preferences as Preferences,
    TrainingSet as TrainingSet,
)
from lightning_rl.learn.own_loop import FabricDDP as FabricDDP
from lightning_rl.learn.policies import RolloutModule as RolloutModule
from lightning_rl.learn.precision import (
    BFloat16Precision as BFloat16Precision,
    MasterWeights as MasterWeights,
)
from lightning_rl.learn.schedulers import (
    WarmupConstant as WarmupConstant,
    WarmupCosine as WarmupCosine,
    WarmupLinear as WarmupLinear,
)
from lightning_rl.learn.update_schedules import (
    Alternating as Alternating,
    EveryIteration as EveryIteration,
    Periodic as Periodic,
    UpdateSchedule as UpdateSchedule,
)
from lightning_rl.models.attention import PackLayout as PackLayout
from lightning_rl.models.heads import (
    SeparateValueHead as SeparateValueHead,
    SharedValueHead as SharedValueHead,
    ValueHead as ValueHead,
)
from lightning_rl.models.lora import LoRA as LoRA
from lightning_rl.models.policy import (
    Policy as Policy,
    Scores as Scores,
    save_skeleton as save_skeleton,
)
from lightning_rl.models.reference import (
    BaseReference as BaseReference,
    FrozenReference as FrozenReference,
    PeriodicReference as PeriodicReference,
    Reference as Reference,
)
from lightning_rl.models.sharding import ShardedStrategy as ShardedStrategy
from lightning_rl.models.tokenizer import load_tokenizer as load_tokenizer
from lightning_rl.module import PolicyModule as PolicyModule
from lightning_rl.offline.dpo import (
    DPOModule as DPOModule,
    PairDataModule as PairDataModule,
    RolloutPairs as RolloutPairs,
)
from lightning_rl.offline.recorded import OfflineDataModule as OfflineDataModule
from lightning_rl.offline.sft import SFTDataModule as SFTDataModule, SFTModule as SFTModule
from lightning_rl.rewards.base import Rewards as Rewards
from lightning_rl.rewards.calling import (
    RewardFailure as RewardFailure,
    batch_reward as batch_reward,
)
from lightning_rl.rewards.judge import (
    EngineJudge as EngineJudge,
    JudgeError as JudgeError,
    JudgeModel as JudgeModel,
    LLMJudge as LLMJudge,
    OpenAIJudge as OpenAIJudge,
)
from lightning_rl.rewards.log import TrainerState as TrainerState
from lightning_rl.rewards.openai_api import APIRefusal as APIRefusal
from lightning_rl.rewards.pool import Isolated as Isolated
from lightning_rl.rewards.remote import (
    Remote as Remote,
    ServerError as ServerError,
    retry as retry,
)
from lightning_rl.rewards.rules import (
    EnvironmentReward as EnvironmentReward,
    OverlongPenalty as OverlongPenalty,
    PythonTests as PythonTests,
)
from lightning_rl.rollout import (
    Call as Call,
    Group as Group,
    Message as Message,
    Prompt as Prompt,
    Rollout as Rollout,
    RolloutStatus as RolloutStatus,
    Row as Row,
    SamplingDistribution as SamplingDistribution,
)
from lightning_rl.run.checkpoint_io import VerifiedCheckpointIO as VerifiedCheckpointIO
from lightning_rl.run.dist import global_mean_std as global_mean_std
from lightning_rl.serving.ask import Answer as Answer
from lightning_rl.serving.errors import RequestError as RequestError
from lightning_rl.serving.function_agent import (
    AgentClient as AgentClient,
    FunctionAgent as FunctionAgent,
)
from lightning_rl.serving.limits import RequestLimits as RequestLimits
from lightning_rl.serving.program_agent import (
    ProgramAgent as ProgramAgent,
    ScriptAgent as ScriptAgent,
)
from lightning_rl.serving.server import AgentServer as AgentServer
from lightning_rl.serving.session import Session as Session
from lightning_rl.sync.base import (
    WeightReceiver as WeightReceiver,
    WeightStream as WeightStream,
    WeightTransport as WeightTransport,
)
from lightning_rl.sync.checkpoint import CheckpointTransport as CheckpointTransport
from lightning_rl.sync.collective import CollectiveTransport as CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport as MemoryTransport
from lightning_rl.sync.native import IPCTransport as IPCTransport, NCCLTransport as NCCLTransport
from lightning_rl.sync.schedule import (
    CollectorSchedule as CollectorSchedule,
    CollectorStatus as CollectorStatus,
    FixedSchedule as FixedSchedule,
    SyncSchedule as SyncSchedule,
    SyncState as SyncState,
    TrainerSchedule as TrainerSchedule,
)
from lightning_rl.sync.staged import StagedTransport as StagedTransport
from lightning_rl.sync.verify import probe_gap as probe_gap
from lightning_rl.verifiers.agent import VerifiersAgent as VerifiersAgent
from lightning_rl.verifiers.prompts import VerifiersPrompts as VerifiersPrompts
