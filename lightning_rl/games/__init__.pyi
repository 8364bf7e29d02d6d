"""Protocols, roles, staged training and game updates, each name from its module."""

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
from lightning_rl.games.module import (
    GameModule as GameModule,
)
from lightning_rl.games.protocols.agent import (
    ProtocolAgent as ProtocolAgent,
)
from lightning_rl.games.protocols.base import (
    ACCEPT as ACCEPT,
    GO_ON as GO_ON,
    REJECT as REJECT,
    VERIFIER as VERIFIER,
    Protocol as Protocol,
    drawn as drawn,
)
from lightning_rl.games.protocols.conversation import (
    Conversation as Conversation,
    Turn as Turn,
)
from lightning_rl.games.protocols.metrics import (
    protocol_metrics as protocol_metrics,
)
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
from lightning_rl.games.protocols.zero_knowledge import (
    ZeroKnowledge as ZeroKnowledge,
)
from lightning_rl.games.roles.game import (
    GameRolesModule as GameRolesModule,
)
from lightning_rl.games.roles.module import (
    RolesModule as RolesModule,
)
from lightning_rl.games.roles.role_policy import (
    RolePolicy as RolePolicy,
)
from lightning_rl.games.simulation_loss import (
    SimulationLoss as SimulationLoss,
)
from lightning_rl.games.solo import (
    SoloDataModule as SoloDataModule,
    SoloModule as SoloModule,
)
from lightning_rl.games.staged.algorithm import (
    StagedAlgorithm as StagedAlgorithm,
)
from lightning_rl.games.staged.callbacks import (
    StagedCallback as StagedCallback,
    StagedLoggers as StagedLoggers,
    StagedRun as StagedRun,
)
from lightning_rl.games.staged.chat import (
    ChatAnswer as ChatAnswer,
    ChatGroup as ChatGroup,
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
from lightning_rl.games.staged.interaction import (
    Interaction as Interaction,
)
from lightning_rl.games.staged.jobs import (
    FineTuneJobs as FineTuneJobs,
    JobReport as JobReport,
    JobRequest as JobRequest,
    JobStatus as JobStatus,
)
from lightning_rl.games.staged.local_jobs import (
    LocalJobs as LocalJobs,
)
from lightning_rl.games.staged.malt import (
    MALT as MALT,
)
from lightning_rl.games.staged.openai_jobs import (
    OpenAIFineTuning as OpenAIFineTuning,
)
from lightning_rl.games.staged.state import (
    StagedState as StagedState,
)
from lightning_rl.games.staged.trainer import (
    StagedTrainer as StagedTrainer,
)
from lightning_rl.games.staged.training_sets import (
    Demonstrations as Demonstrations,
    Example as Example,
    Pair as Pair,
    Preferences as Preferences,
    TrainingSet as TrainingSet,
)
