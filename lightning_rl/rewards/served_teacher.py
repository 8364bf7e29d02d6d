"""ServedTeacher: the logprobs of a model that vLLM serves, for the tokens of a completion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_rl.config.arguments import configurable
from lightning_rl.data.teacher_logprobs import TeacherLogprobs
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.openai_api import APIRefusal, OpenAIAPI
from lightning_rl.rewards.remote import Remote
from lightning_rl.rewards.teachers import Teacher, Text, scored, unknown
from lightning_rl.rollout import Rollout
from lightning_rl.run.retry import ServerError


@dataclass(frozen=True)
class _Logprob:
    logprob: float


@dataclass(frozen=True)
class _Choice:
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


@dataclass(frozen=True)
class _Completion:
    choices: list[_Choice]
    called: ClassVar[str] = "completion"


@configurable
class ServedTeacher(Teacher, Remote):
    """A teacher that vLLM serves: ``vllm serve MODEL``, on any machine and any number of GPUs.

    It sends prompt and completion as tokens to ``/completions`` and asks for ``prompt_logprobs``,
    which are those at temperature 1: so the policy has to sample at 1. A server that cannot be
    reached or fails is asked again; after the last attempt the rollout is FAILED.

    Args:
        base_url: the server's address, up to and including ``/v1``: ``http://localhost:8000/v1``.
        model: the server's name for the model.
        tokenizer: directory or hub name of its tokenizer, to compare with the policy's; None:
            ``model``.
        top_k: number of its likeliest tokens to tell for each written one, for
            ``TeacherDivergence``; more than 20 need the server's ``--max-logprobs``.
        hint: text that only the teacher reads, at the end of the prompt's last message, with
            columns of the prompt in braces; None: no hint.
        api_key_env: name of the environment variable that holds the key; None: no key.
        name: name under which its score is logged.
        options: arguments of :class:`Remote` except ``function``.

    Raises:
        ConfigError: for values out of range, an address that is not http(s), or a teacher with
            other tokens than the policy's.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: str | None = None,
        top_k: int = 0,
        hint: str | None = None,
        api_key_env: str | None = None,
        name: str = "teacher",
        **options: Any,
    ) -> None:
        Teacher.__init__(self, model, tokenizer or model, top_k, hint)
        super(Teacher, self).__init__(self._ask, **options)  # type: ignore[arg-type]
        self.__name__ = name
        self._api = OpenAIAPI(base_url, api_key_env)

    async def _ask(self, rollouts: list[Rollout]) -> list[Score]:
        texts = self.texts(rollouts[0])
        hot = next((t.sampling.temperature for t in texts if t.sampling.temperature != 1), None)
        if hot is not None and rollouts[0].trained:
            return [
                RewardFailure(
                    f"sampling.temperature={hot}, but a served teacher's logprobs are those at 1; "
                    "set it to 1, or use ModelTeacher"
                )
            ]
        try:
            found = [await self._of(text) for text in texts]
        except APIRefusal as error:
            return [RewardFailure(str(error))]
        return [scored(texts, found)]

    async def _of(self, text: Text) -> str:
        key = text.key
        if (known := self._known.get(key)) is not None:
            return known
        token_ids = text.prompt_ids + text.row.token_ids
        body = {
            "model": self.model,
            "prompt": token_ids,
            "prompt_logprobs": self.top_k,
            "max_tokens": 1,
            "temperature": 0,
        }
        answer = await self._api.post("/completions", _Completion, body)
        each = answer.choices[0].prompt_logprobs if answer.choices else None
        if each is None or len(each) != len(token_ids):
            raise ServerError(
                f"{self._api.base_url} sent no prompt_logprobs of the {len(token_ids)} tokens; a "
                "teacher has to be served by vLLM"
            )
        found = unknown(len(text.row.token_ids), self.top_k)
        begin = len(text.prompt_ids)
        for index, (token, logprobs) in enumerate(
            zip(text.row.token_ids, each[begin:], strict=True)
        ):
            _fill(found, index, token, logprobs or {})
        return self.remember(key, found)


def _fill(found: TeacherLogprobs, place: int, token: int, told: Mapping[str, _Logprob]) -> None:
    """Enter what a server told of one token: its own logprob, and those of the likeliest."""
    if str(token) not in told:
        raise ServerError(f"the teacher told no logprob of token {token}; has it other tokens?")
    found.logprobs[place] = told[str(token)].logprob
    ranked = sorted(told.items(), key=lambda one: -one[1].logprob)[: found.ids.shape[1]]
    for rank, (name, one) in enumerate(ranked):
        found.ids[place, rank], found.top_logprobs[place, rank] = int(name), one.logprob
