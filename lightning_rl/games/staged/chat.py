"""ChatModel: answers chats, with models that change by fine-tuning; ChatGroup: who shares one."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.chat import ChatEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.games.staged.jobs import FineTuneJobs
from lightning_rl.rewards.openai_api import OPENAI_URL, PatientAPI
from lightning_rl.rollout import Message


class ChatAnswer(NamedTuple):
    """A model's answer; ``cut``: it was cut off by its limit of tokens."""

    text: str
    cut: bool


class ChatModel(ABC):
    """Answers chats with the model that it was last told to use."""

    @abstractmethod
    def use(self, model: str) -> None:
        """Answer with this model from now on; called before the first question."""

    @abstractmethod
    async def ask(self, messages: Sequence[Message], seed: int) -> ChatAnswer:
        """Return the answer to a chat.

        Raises:
            LightningRLError: if there is no answer; the run ends, and can be resumed from here.
        """

    def close(self) -> None:
        """Release what ``use`` acquired."""


@configurable
class OpenAIChat(ChatModel):
    """Answers by a server with OpenAI's chat-completions API.

    Args:
        base_url: the address up to and including ``/v1``.
        api_key_env: name of the environment variable that holds the key, which is read for each
            request and stored nowhere; None: no key.
        options: further fields of each request, such as ``temperature`` and ``max_tokens``.
        retries: attempts after the first, for each question.
        timeout_s: seconds per attempt.
        first_wait_s: seconds before the first retry, at most; each further wait is twice as long.

    Raises:
        ConfigError: if a value is out of range, or the address is not http(s).
    """

    def __init__(
        self,
        base_url: str = OPENAI_URL,
        api_key_env: str | None = "OPENAI_API_KEY",
        options: dict[str, Any] | None = None,
        retries: int = 8,
        timeout_s: float = 120.0,
        first_wait_s: float = 1.0,
    ) -> None:
        self.api = PatientAPI(base_url, api_key_env, retries, timeout_s, first_wait_s)
        self.options = options or {}
        if fixed := self.options.keys() & {"model", "messages", "seed", "n", "stream"}:
            raise ConfigError(f"OpenAIChat.options.{min(fixed)} is set by the run; leave it out")
        self.model = ""

    def use(self, model: str) -> None:
        self.model = model

    async def ask(self, messages: Sequence[Message], seed: int) -> ChatAnswer:
        body = {"model": self.model, "messages": list(messages), "seed": seed} | self.options
        text, ending = await self.api.retried(lambda: self.api.chat(body))
        return ChatAnswer(text, ending == "length")


@configurable
class EngineChat(ChatModel):
    """Answers by an engine of this library, from a model's directory, such as a local job's result.

    Args:
        engine: the engine; None: ``TransformersEngine``. vLLM in this process is for one group of
            agents only; ``VLLMServer`` has its own processes.
        sampling: the sampling settings of answers.
    """

    def __init__(
        self, engine: Engine | None = None, sampling: Sampling = Sampling(max_tokens=256)
    ) -> None:
        self._chat = ChatEngine(engine, sampling)

    def use(self, model: str) -> None:
        self._chat.load(model)

    async def ask(self, messages: Sequence[Message], seed: int) -> ChatAnswer:
        text, ending = await self._chat.ask(messages, seed)
        return ChatAnswer(text, ending == "length")

    def close(self) -> None:
        self._chat.close()


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
