"""ModelReward and ServedReward: a trained reward model scores the policy's completions."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModelForSequenceClassification

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least
from lightning_rl.models.pretrained import (
    Loading,
    device_of,
    dtype_of,
    require_local,
    weight_bytes,
)
from lightning_rl.models.reward_model import RewardModel, padded, scored_text
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.openai_api import APIRefusal, OpenAIAPI
from lightning_rl.rewards.remote import Remote


@configurable
class ModelReward:
    """The score of a reward model, in this process: a sequence classifier with one label.

    Models of ``RewardModelModule`` and TRL's ``RewardTrainer`` are such, and most on the hub.
    Prompt and completion are written by the reward model's own tokenizer and chat template. The
    model is loaded when the first completions are graded. A text that is too long for it, or that
    it gives NaN, makes the rollout FAILED.

    Args:
        model: directory or hub name.
        name: name under which the reward is logged.
        batch_size: texts per forward pass.
        dtype: of its weights: ``float32``, ``bfloat16`` or ``float16``.
        device: where it computes; None: on a GPU if there is one.
        trust_remote_code: run code that comes with the model.
        model_kwargs: further arguments of ``from_pretrained``, such as ``revision``.

    Raises:
        ConfigError: for values out of range, or a directory that does not exist.
    """

    def __init__(
        self,
        model: str,
        name: str = "reward_model",
        batch_size: int = 8,
        dtype: str = "float32",
        device: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_at_least(1, batch_size=batch_size)
        require_local(model)
        dtype_of("ModelReward", dtype)
        self.model = model
        self.batch_size = batch_size
        self.dtype = dtype
        self.device = device
        self.loading = Loading(trust_remote_code, model_kwargs or {})
        self.__name__ = name
        self._scorer: RewardModel | None = None

    def __call__(
        self, prompts: list[Any], completions: list[Any], finish_reasons: list[str | None]
    ) -> list[Score]:
        scorer = self._scorer = self._scorer or self._loaded()
        texts = [
            scored_text(scorer.tokenizer, prompt, said, reason == "stop")
            for prompt, said, reason in zip(prompts, completions, finish_reasons, strict=True)
        ]
        limit = scorer.max_tokens
        scores: list[Score] = [
            RewardFailure(f"its text of {len(text)} tokens exceeds the model's {limit}")
            for text in texts
        ]
        # Texts of similar lengths together, since padding is computed too.
        fit = (i for i, text in enumerate(texts) if limit is None or len(text) <= limit)
        order = sorted(fit, key=lambda i: len(texts[i]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            batch = padded([texts[i] for i in rows], scorer.lm.config.pad_token_id)
            with torch.inference_mode():
                found = scorer({name: t.to(scorer.lm.device) for name, t in batch.items()}).tolist()
            for row, score in zip(rows, found, strict=True):
                scores[row] = score
        return scores

    def _loaded(self) -> RewardModel:
        scorer = RewardModel(self.model, self.loading, dtype=dtype_of("ModelReward", self.dtype))
        return scorer.eval().requires_grad_(False).to(device_of(self.device))

    def weight_bytes(self) -> int:
        """Return the bytes of its weights, from the model's configuration alone."""
        dtype = dtype_of("ModelReward", self.dtype)
        return weight_bytes(self.model, self.loading, dtype, AutoModelForSequenceClassification)

    def close(self) -> None:
        """Free the model."""
        self._scorer = None


@dataclass(frozen=True)
class _Classified:
    probs: list[float]


@dataclass(frozen=True)
class _Classification:
    data: list[_Classified]
    called: ClassVar[str] = "classification"


@configurable
class ServedReward(Remote):
    """The score of a reward model that vLLM serves: ``vllm serve MODEL --runner pooling``.

    It sends the tokens of prompt and completion, as :class:`ModelReward` reads them, to
    ``/classify``, and takes the score before any activation. A server that cannot be reached or
    fails is asked again; after the last attempt the rollout is FAILED.

    Args:
        base_url: the server's address, without ``/v1``: ``http://localhost:8000``.
        model: the server's name for the model.
        tokenizer: directory or hub name of its tokenizer; None: ``model``.
        api_key_env: name of the environment variable that holds the key; None: no key.
        name: name under which the reward is logged.
        options: arguments of :class:`Remote` except ``function``.

    Raises:
        ConfigError: for values out of range, an address that is not http(s), or a directory that
            does not exist.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: str | None = None,
        api_key_env: str | None = None,
        name: str = "reward_model",
        **options: Any,
    ) -> None:
        super().__init__(self._ask, **options)  # type: ignore[arg-type]  # async, as it requires
        require_local(tokenizer or model)
        self.model = model
        self.tokenizer = tokenizer or model
        self.__name__ = name
        self._api = OpenAIAPI(base_url, api_key_env)
        self._loaded: Any = None

    async def _ask(
        self, prompts: list[Any], completions: list[Any], finish_reasons: list[str | None]
    ) -> list[Score]:
        self._loaded = self._loaded or load_tokenizer(self.tokenizer)
        text = scored_text(self._loaded, prompts[0], completions[0], finish_reasons[0] == "stop")
        body = {"model": self.model, "input": text, "use_activation": False}
        try:
            answer = await self._api.post("/classify", _Classification, body)
        except APIRefusal as error:
            return [RewardFailure(str(error))]
        scores = answer.data[0].probs if answer.data else []
        if len(scores) != 1:
            return [
                RewardFailure(f"{self.model} gave {len(scores)} scores; it must have one label")
            ]
        return [scores[0]]
