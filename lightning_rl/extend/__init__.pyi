"""Base classes, types and functions for your own parts, and rare variants, from their modules."""

from lightning_rl.agents.base import (
    Agent as Agent,
    Environment as Environment,
    Reply as Reply,
    append_given as append_given,
    generate_turn as generate_turn,
    room as room,
)
from lightning_rl.agents.branching import (
    EveryCall as EveryCall,
    FixedCalls as FixedCalls,
    ForkPoints as ForkPoints,
    RandomCalls as RandomCalls,
    forked as forked,
)
from lightning_rl.agents.episode import (
    Episode as Episode,
)
from lightning_rl.agents.mcp import (
    MCPTools as MCPTools,
)
from lightning_rl.agents.templates import (
    HermesParser as HermesParser,
    ParsedCall as ParsedCall,
    ToolParser as ToolParser,
    TurnTemplate as TurnTemplate,
    VLLMParser as VLLMParser,
)
from lightning_rl.algos.advantages import (
    Advantage as Advantage,
    GroupAdvantage as GroupAdvantage,
    group_means as group_means,
    group_stds as group_stds,
    spread_over_tokens as spread_over_tokens,
    total_rewards as total_rewards,
)
from lightning_rl.algos.correction import (
    Correction as Correction,
)
from lightning_rl.algos.experts import (
    LoadBalance as LoadBalance,
    OldRouting as OldRouting,
    RolloutRouting as RolloutRouting,
    RoutingReplay as RoutingReplay,
)
from lightning_rl.algos.kl import (
    KLPenalty as KLPenalty,
)
from lightning_rl.algos.losses import (
    Metrics as Metrics,
    PolicyLoss as PolicyLoss,
    ValueLoss as ValueLoss,
    ppo_clip as ppo_clip,
    row_means as row_means,
)
from lightning_rl.algos.objective import (
    Aggregation as Aggregation,
    Decision as Decision,
)
from lightning_rl.algos.schedules import (
    AdaptiveCoefficient as AdaptiveCoefficient,
    AdaptiveEntropy as AdaptiveEntropy,
    AdaptiveKL as AdaptiveKL,
    AdaptiveSchedule as AdaptiveSchedule,
    ConstantSchedule as ConstantSchedule,
    ExponentialSchedule as ExponentialSchedule,
    LinearSchedule as LinearSchedule,
    Schedule as Schedule,
)
from lightning_rl.cli import (
    Command as Command,
)
from lightning_rl.collect.collector import (
    Collector as Collector,
    GroupFilter as GroupFilter,
)
from lightning_rl.collect.partial import (
    PartialTailCollector as PartialTailCollector,
    TailBatchingCollector as TailBatchingCollector,
)
from lightning_rl.collect.peek import (
    Peek as Peek,
)
from lightning_rl.collect.pipeline import (
    GroupSource as GroupSource,
    RolloutPipeline as RolloutPipeline,
)
from lightning_rl.collect.samplers import (
    FIFO as FIFO,
    AdvantagePriority as AdvantagePriority,
    BufferEntry as BufferEntry,
    Mixed as Mixed,
    RewardPriority as RewardPriority,
    Sampler as Sampler,
    Uniform as Uniform,
)
from lightning_rl.config.arguments import (
    configurable as configurable,
)
from lightning_rl.data.batch import (
    token_rows as token_rows,
)
from lightning_rl.data.mixing import (
    ByPassRate as ByPassRate,
    FixedWeights as FixedWeights,
    Mixing as Mixing,
    RoundRobin as RoundRobin,
)
from lightning_rl.data.packing import (
    pack_rollouts as pack_rollouts,
)
from lightning_rl.data.plans import (
    GroupPlan as GroupPlan,
)
from lightning_rl.data.prompts import (
    PromptDataset as PromptDataset,
)
from lightning_rl.data.rollouts.files import (
    RolloutFile as RolloutFile,
    open_rollouts as open_rollouts,
)
from lightning_rl.data.rollouts.store import (
    RolloutStore as RolloutStore,
)
from lightning_rl.data.supervised import (
    supervised_rollout as supervised_rollout,
)
from lightning_rl.data.views import (
    as_padded as as_padded,
    as_steps as as_steps,
    as_torchrl as as_torchrl,
)
from lightning_rl.engines import (
    Completion as Completion,
    Engine as Engine,
    TransformersAdapters as TransformersAdapters,
    VLLMAdapters as VLLMAdapters,
)
from lightning_rl.engines.base import (
    ReplicaStatus as ReplicaStatus,
    RunState as RunState,
)
from lightning_rl.engines.multi_policy_engine import (
    MultiPolicyEngine as MultiPolicyEngine,
)
from lightning_rl.engines.push import (
    HeldDigests as HeldDigests,
    Push as Push,
    require_same_weights as require_same_weights,
)
from lightning_rl.engines.replicas.server_list import (
    ServerList as ServerList,
    ServersByName as ServersByName,
    ServersInFile as ServersInFile,
)
from lightning_rl.learn.backends import (
    Backend as Backend,
    TorchBackend as TorchBackend,
)
from lightning_rl.learn.learner import (
    Learner as Learner,
)
from lightning_rl.learn.own_loop import (
    FabricDDP as FabricDDP,
    OwnLoop as OwnLoop,
)
from lightning_rl.learn.policies import (
    RolloutModule as RolloutModule,
)
from lightning_rl.learn.precision import (
    BFloat16Precision as BFloat16Precision,
    MasterWeights as MasterWeights,
)
from lightning_rl.learn.probe import (
    probe_gap as probe_gap,
)
from lightning_rl.learn.update_schedules import (
    Alternating as Alternating,
    EveryIteration as EveryIteration,
    Periodic as Periodic,
    UpdateSchedule as UpdateSchedule,
)
from lightning_rl.models.attention.packed import (
    PackLayout as PackLayout,
)
from lightning_rl.models.heads import (
    ValueHead as ValueHead,
)
from lightning_rl.models.model_files import (
    save_skeleton as save_skeleton,
)
from lightning_rl.models.policy import (
    Policy as Policy,
    Scores as Scores,
)
from lightning_rl.models.quantization import (
    Quantization as Quantization,
)
from lightning_rl.models.reference import (
    Reference as Reference,
)
from lightning_rl.models.tokenizer import (
    load_tokenizer as load_tokenizer,
)
from lightning_rl.rewards.calling import (
    RewardFailure as RewardFailure,
    batch_reward as batch_reward,
)
from lightning_rl.rewards.judge_models import (
    EngineJudge as EngineJudge,
    JudgeError as JudgeError,
    JudgeModel as JudgeModel,
    OpenAIJudge as OpenAIJudge,
)
from lightning_rl.rewards.length import (
    LengthScale as LengthScale,
    LinearLength as LinearLength,
    RankedLength as RankedLength,
)
from lightning_rl.rewards.log import (
    TrainerState as TrainerState,
)
from lightning_rl.rewards.openai_api import (
    APIRefusal as APIRefusal,
)
from lightning_rl.rewards.rubric import (
    Criterion as Criterion,
)
from lightning_rl.rewards.sandbox import (
    sandboxed as sandboxed,
)
from lightning_rl.rollout import (
    Call as Call,
    Group as Group,
    Message as Message,
    RolloutStatus as RolloutStatus,
    Row as Row,
    SamplingDistribution as SamplingDistribution,
)
from lightning_rl.run.digest import (
    digests as digests,
)
from lightning_rl.run.files.checkpoint_io import (
    VerifiedCheckpointIO as VerifiedCheckpointIO,
)
from lightning_rl.run.processes.dist import (
    global_mean_std as global_mean_std,
)
from lightning_rl.run.retry import (
    ServerError as ServerError,
    retry as retry,
)
from lightning_rl.sync.base import (
    WeightTransport as WeightTransport,
)
from lightning_rl.sync.native import (
    IPCTransport as IPCTransport,
    NCCLTransport as NCCLTransport,
)
from lightning_rl.sync.schedule import (
    CollectorSchedule as CollectorSchedule,
    CollectorStatus as CollectorStatus,
    SyncSchedule as SyncSchedule,
    SyncState as SyncState,
    TrainerSchedule as TrainerSchedule,
)
from lightning_rl.sync.staged import (
    StagedTransport as StagedTransport,
)
from lightning_rl.sync.stream import (
    WeightPart as WeightPart,
    WeightReceiver as WeightReceiver,
)
