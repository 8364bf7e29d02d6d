"""Agents that are programs, and the endpoint that they talk to, each name from its module."""

from lightning_rl.serving.ask import (
    Answer as Answer,
)
from lightning_rl.serving.errors import (
    RequestError as RequestError,
)
from lightning_rl.serving.function_agent import (
    AgentClient as AgentClient,
    FunctionAgent as FunctionAgent,
)
from lightning_rl.serving.limits import (
    RequestLimits as RequestLimits,
)
from lightning_rl.serving.program_agent import (
    ProgramAgent as ProgramAgent,
    ScriptAgent as ScriptAgent,
)
from lightning_rl.serving.server import (
    AgentServer as AgentServer,
)
from lightning_rl.serving.session import (
    Session as Session,
)
