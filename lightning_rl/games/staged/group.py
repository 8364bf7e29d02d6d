"""ChatGroup: agents that share one model, and what it takes to ask and to train it."""

import re
from collections.abc import Mapping, Sequence

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.games.staged.chat import ChatModel, OpenAIChat
from lightning_rl.games.staged.jobs import FineTuneJobs

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@configurable
class ChatGroup:
    """Agents with one model, which their prompts tell who they are.

    Args:
        agents: names of the protocol's agents.
        model: what they begin with: a name that the server knows, or a directory.
        chat: who answers; None: ``OpenAIChat``.
        jobs: who trains it; None: it is never trained.

    Raises:
        ConfigError: without agents.
    """

    def __init__(
        self,
        agents: list[str],
        model: str,
        chat: ChatModel | None = None,
        jobs: FineTuneJobs | None = None,
    ) -> None:
        if not agents:
            raise ConfigError(f"agents={agents} names nobody who shares model={model!r}")
        self.agents = agents
        self.model = model
        self.chat = OpenAIChat() if chat is None else chat
        self.jobs = jobs


def require_groups(groups: Mapping[str, ChatGroup], agents: Sequence[str]) -> None:
    """Check that each of a protocol's agents is in one group.

    Raises:
        ConfigError: naming who is in none, in two, or unknown; or a name that no job could bear.
    """
    for name in groups:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"groups: {name!r} becomes a part of its jobs' names; use up to 32 letters, "
                "digits, _ or -"
            )
    named = [agent for group in groups.values() for agent in group.agents]
    if strange := set(named) - set(agents):
        raise ConfigError(
            f"groups: {min(strange)!r} is no agent of the protocol; it has {', '.join(agents)}"
        )
    for agent in agents:
        if named.count(agent) != 1:
            raise ConfigError(
                f"groups: {agent!r} is in {named.count(agent)} of them; it must be in one"
            )
