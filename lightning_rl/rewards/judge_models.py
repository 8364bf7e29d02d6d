"""JudgeModel: a language model that answers a judge's questions, on a server or in this process."""

from abc import ABC, abstractmethod
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.chat import ChatEngine
from lightning_rl.engines.sampling import Sampling, request_seed
from lightning_rl.errors import RewardError
from lightning_rl.models.pretrained import model_of
from lightning_rl.rewards.openai_api import APIRefusal, OpenAIAPI


class JudgeError(RewardError):
    """A judge cannot be asked, or its answer cannot be used; retrying would not help."""


class JudgeModel(ABC):
    """Answers questions with text."""

    max_tokens: int | None = None
    """The most tokens of an answer, if a service writes it."""

    def start(self) -> None:
        """Get ready for questions; does nothing if already started."""

    @abstractmethod
    async def ask(self, question: str) -> str:
        """Return the answer to a question, which becomes one user message.

        Raises:
            JudgeError: if asking again would not help. After any other error it is asked again.
        """

    async def ask_for_json(self, question: str, schema: dict[str, Any]) -> str:
        """Return the answer to a question that asks for a JSON object.

        A model that can be held to a JSON schema answers with that object alone. Others, as this
        one, are only asked, so the object may stand anywhere in the answer, or be missing.

        Raises:
            JudgeError: as :meth:`ask`.
        """
        return await self.ask(question)

    def close(self) -> None:
        """Free what ``start`` allocated."""


@configurable
class OpenAIJudge(JudgeModel):
    """A server that speaks OpenAI's chat completions, such as ``vllm serve`` or a hosted model.

    Args:
        base_url: the server's address, up to and including ``/v1``.
        model: the server's name for the model.
        api_key_env: name of the environment variable that holds the key, which is read at each
            request and stored nowhere; None: no key.
        options: extra fields of the request.
        structured: have the server hold answers to rubrics and rankings to their JSON schema, as
            ``response_format``; False: for a server that cannot, or for a model that does not think
            by itself, and should write its reasons first.

    Raises:
        ConfigError: for an address that is not http(s).
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        options: dict[str, Any] | None = None,
        structured: bool = True,
    ) -> None:
        self.api = OpenAIAPI(base_url, api_key_env)
        self.model = model
        self.options = {"temperature": 0.0, "max_tokens": 512} | (options or {})
        self.max_tokens = self.options["max_tokens"]
        self.structured = structured

    async def ask(self, question: str) -> str:
        return await self._ask(question, {})

    async def ask_for_json(self, question: str, schema: dict[str, Any]) -> str:
        if not self.structured:
            return await self.ask(question)
        form = {"name": "verdict", "strict": True, "schema": schema}
        return await self._ask(
            question, {"response_format": {"type": "json_schema", "json_schema": form}}
        )

    async def _ask(self, question: str, form: dict[str, Any]) -> str:
        body = {"model": self.model, "messages": [_user(question)]} | form | self.options
        try:
            text, _ = await self.api.chat(body)
        except APIRefusal as error:
            unknown = form and error.status in (400, 422)
            fix = "; if it does not know response_format, set structured: false" if unknown else ""
            raise JudgeError(f"{error}{fix}") from error
        return text


@configurable(model=model_of)
class EngineJudge(JudgeModel):
    """A separate model in this process, run by any engine.

    Args:
        model: directory or hub name of a model with a chat template.
        engine: runs the model; None: ``TransformersEngine``. vLLM in process can run only one
            model, the policy.
        sampling: sampling settings of the answers.
    """

    def __init__(
        self,
        model: str,
        engine: Engine | None = None,
        sampling: Sampling = Sampling(max_tokens=256, temperature=0.0),
    ) -> None:
        self.model = model
        self._chat = ChatEngine(engine, sampling)

    @property
    def engine(self) -> Engine:
        """The engine that runs the model."""
        return self._chat.engine

    def start(self) -> None:
        self._chat.load(self.model)

    async def ask(self, question: str) -> str:
        # The same question gets the same answer, also in a resumed run.
        text, _ = await self._chat.ask([_user(question)], request_seed(0, question, 0, 0))
        return text

    def close(self) -> None:
        self._chat.close()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
