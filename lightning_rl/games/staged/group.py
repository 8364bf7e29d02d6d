"""ChatGroup: agents that share one model, how it is asked, and how it is trained."""

import re
from collections.abc import Mapping, Sequence

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.games.staged.chat import ChatModel, OpenAIChat
from lightning_rl.games.staged.jobs import FineTuneJobs

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@configurable
class ChatGroup:
    """Agents that share one model; their prompts tell it which agent it is.

    Args:
        agents: names of the protocol's agents.
        model: the initial model: a name that the server knows, or a directory.
        chat: answers for the agents; None: ``OpenAIChat``.
        jobs: trains the model; None: it is never trained.

    Raises:
        ConfigError: if there are no agents.
    """

    def __init__(
        self,
        agents: list[str],
        model: str,
        chat: ChatModel | None = None,
        jobs: FineTuneJobs | None = None,
    ) -> None:
        if not agents:
            raise ConfigError(
                f"agents={agents} names no agent for model={model!r}; name at least one"
            )
        self.agents = agents
        self.model = model
        self.chat = OpenAIChat() if chat is None else chat
        self.jobs = jobs


def require_groups(groups: Mapping[str, ChatGroup], agents: Sequence[str]) -> None:
    """Check that each of a protocol's agents is in exactly one group.

    Raises:
        ConfigError: naming an agent that is unknown, in no group or in two; or a group whose name
            cannot be part of a job's name.
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
            f"groups: {min(strange)!r} is not an agent of the protocol; its agents are "
            f"{', '.join(agents)}"
        )
    for agent in agents:
        if named.count(agent) != 1:
            raise ConfigError(
                f"groups: {agent!r} is in {named.count(agent)} of them; name it in exactly one"
            )
