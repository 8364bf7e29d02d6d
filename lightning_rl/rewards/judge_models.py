"""Who is asked by an LLM judge: an engine in this process, or a server."""

import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from lightning_rl.arguments import configurable
from lightning_rl.engines.base import Engine, Sampling, request_seed
from lightning_rl.engines.transformers import TransformersEngine
from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.models.given import model_of

RETRY_STATUSES = {408, 409, 425, 429}
"""Client errors (4xx) that another attempt may get over: too early, too many, in conflict."""


class JudgeError(RewardError):
    """A judge cannot be asked, or its answer cannot be used; another attempt would not help."""


class JudgeModel(ABC):
    """Answers one question with a text."""

    def start(self) -> None:
        """Called before questions come; does nothing if it has started."""

    @abstractmethod
    async def ask(self, question: str) -> str:
        """The answer to a question, which becomes one user message.

        Raises:
            JudgeError: if asking again would not help. After any other error it is asked again.
        """

    def close(self) -> None:
        """Give back what ``start`` took."""


@configurable
class OpenAIJudge(JudgeModel):
    """A server that speaks OpenAI's chat completions, such as ``vllm serve`` or a hosted model.

    Args:
        base_url: up to and with ``/v1``.
        model: the server's name for it.
        api_key_env: name of the environment variable that holds the key, which is read when asking
            and stored nowhere; None: no key.
        options: further fields of the request.

    Raises:
        ConfigError: for an address that is not http(s).
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r} must begin with http:// or https://")
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model = model
        self.api_key_env = api_key_env
        self.options = {"temperature": 0.0, "max_tokens": 512} | (options or {})

    async def ask(self, question: str) -> str:
        import aiohttp

        key = self._key()
        body = {"model": self.model, "messages": [_user(question)]} | self.options
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # One session per question: sessions belong to an event loop, and judges outlive loops.
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.post(self.url, json=body, headers=headers) as response,
        ):
            text = await response.text(errors="replace")
            text = text if key is None else text.replace(key, "***")  # it may be shown
            if response.status >= 400:
                problem = f"{self.url} answered {response.status}: {text:.200}"
                if response.status < 500 and response.status not in RETRY_STATUSES:
                    raise JudgeError(problem)
                raise RewardError(problem)
            try:
                answer = (await response.json(content_type=None))["choices"][0]["message"]
                return str(answer["content"])
            except (ValueError, LookupError, TypeError) as error:
                raise RewardError(f"{self.url} sent no chat completion: {text:.200}") from error

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise JudgeError(
                f"api_key_env={self.api_key_env!r} names an environment variable that is not set; "
                "set it to the judge's key"
            )
        return key


@configurable(model=model_of)
class EngineJudge(JudgeModel):
    """A model of its own in this process, in any engine.

    Args:
        model: directory or hub name of a model with a chat template.
        engine: None: ``TransformersEngine``. vLLM in process is for one model only, the policy's.
        sampling: of its answers.
    """

    def __init__(
        self,
        model: str,
        engine: Engine | None = None,
        sampling: Sampling = Sampling(max_tokens=256, temperature=0.0),
    ) -> None:
        self.model = model
        self.engine = engine if engine is not None else TransformersEngine()
        self.sampling = sampling
        self._tokenizer: Any = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        # Here, because a judge over HTTP needs none of it.
        from lightning_rl.models.policy import Policy, load_tokenizer, save_skeleton

        if self.engine.running:
            return
        self._tokenizer = load_tokenizer(self.model)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"the judge {self.model!r} has no chat template; use a chat model")
        self._directory = tempfile.TemporaryDirectory(prefix="lightning_rl_judge_")
        save_skeleton(self.model, self._directory.name)
        self.engine.start(Path(self._directory.name))
        self.engine.load_weights(Policy(self.model).named_weights(), 0)

    async def ask(self, question: str) -> str:
        text = self._tokenizer.apply_chat_template(
            [_user(question)], tokenize=False, add_generation_prompt=True
        )
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        # The same question gets the same answer, also in a resumed run.
        seed = request_seed(0, question, 0, 0)
        completion = await self.engine.generate(token_ids, self.sampling, seed)
        return str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def close(self) -> None:
        self.engine.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
